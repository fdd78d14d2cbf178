"""Drafted text as nodes of the target's ids."""

from __future__ import annotations

import math

import numpy as np
from draftline.core.arrays import ROOT
from draftline.core.proposals import DraftRequest, LogitsParams
from draftline.drafters.model.vocabulary.strategy import DraftNodes
from draftline.drafters.model.vocabulary.written import WrittenVocabulary
from support.tools.tiny_tokenizers import letters, single_bytes, unigram, vocabulary

DRAFT = letters("a", "b", "c", "ab", "cab")
TARGET = letters("a", "b", "c", "bc", "abc", "ca")
DRAFT_END, TARGET_END = 5, 6


def nodes(tokens: list[int], parents: list[int], probs: list[float]) -> DraftNodes:
    return DraftNodes(
        np.array(tokens, dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.log(np.array(probs, dtype=np.float32)),
    )


def opened(committed: list[int]) -> DraftRequest:
    return DraftRequest("r", np.array(committed, dtype=np.int32), len(committed), 0.0, 1)


def written(drafted: DraftNodes, committed: list[int]) -> list[tuple[int, int, float]]:
    own = WrittenVocabulary(DRAFT, TARGET, 6, 7)
    result = own.nodes(own.text(opened(committed)), drafted)
    probs = [round(math.exp(log_prob), 4) for log_prob in result.log_probs.tolist()]
    return list(zip(result.tokens.tolist(), result.parents.tolist(), probs, strict=True))


def test_a_chain_is_encoded_as_a_whole_behind_the_committed_ids() -> None:
    # "a" is committed, "bc" + "ab" follows: "abc" may not be made of the committed "a".
    chain = nodes([1, 2, 3], [ROOT, 0, 1], [0.5, 0.25, 0.5])
    assert written(chain, [0]) == [(3, ROOT, 0.125), (0, 0, 0.5), (1, 1, 1.0)]


def test_paths_are_merged_by_what_they_become() -> None:
    # "ab" as one token and as two: the same text stands in the tree once.
    tree = nodes([3, 0, 2, 1, 2], [ROOT, ROOT, 0, 1, 3], [0.5, 0.25, 0.5, 0.5, 0.5])
    assert written(tree, [2]) == [(4, ROOT, 0.25)]
    fork = nodes([0, 1, 2], [ROOT, 0, 0], [0.5, 0.5, 0.25])
    assert written(fork, [1]) == [(0, ROOT, 0.5), (1, 0, 0.5), (2, 0, 0.25)]


def test_the_end_of_a_text_is_the_target_s() -> None:
    chain = nodes([1, DRAFT_END, 2], [ROOT, 0, 1], [0.5, 0.25, 1.0])
    assert written(chain, [0]) == [(1, ROOT, 0.5), (TARGET_END, 0, 0.25)]
    assert written(nodes([DRAFT_END], [ROOT], [0.5]), [0]) == [(TARGET_END, ROOT, 0.5)]


def test_a_draft_goes_on_within_a_character() -> None:
    target, draft = vocabulary(single_bytes()), vocabulary(unigram())
    own = WrittenVocabulary(draft, target, len(draft.surfaces), len(target.surfaces))
    first, second = target.encode("é")
    text = own.text(opened([*target.encode("h"), first]))
    spelled = [draft.byte_ids[byte] for byte in "é!".encode()]
    other = [draft.byte_ids[byte] for byte in "ö".encode()]
    chain = nodes(spelled, [ROOT, 0, 1], [0.5, 0.5, 0.5])
    assert own.nodes(text, chain).tokens.tolist() == [second, *target.encode("!")]
    assert own.nodes(text, nodes(other, [ROOT, 0], [0.5, 0.5])).tokens[0] != second
    assert not len(own.nodes(text, nodes(draft.encode("x"), [ROOT, 0], [1, 1])).tokens)


def test_what_is_said_of_ids_is_not_said_of_text() -> None:
    own = WrittenVocabulary(DRAFT, TARGET, 6, 7)
    params = LogitsParams(top_k=3, logit_bias={1: 5.0}, presence_penalty=1.0)
    ids = np.array([0, 1], dtype=np.int32)
    request = DraftRequest("r", ids, 2, 0.7, 99, logits_params=params)
    distribution = own.distribution(request)
    assert distribution.logits_params == LogitsParams(top_k=3)
    assert distribution.temperature == 0.7
    # Its noise is not the target's: an id means another token there.
    assert distribution.seed != 99
    assert distribution.is_plain
