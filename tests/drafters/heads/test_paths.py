"""Heads behind paths that the target has not confirmed."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.proposals import DraftRequest, FeatureRows, Query
from support.inputs import head_checkpoints as published
from support.inputs.head_pairs import SEED, TEXT, Pair, chosen, opened, tell

GOES_ON = {"eagle", "fspad", "griffin", "eagle3", "deep_eagle3"}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_behind_a_path_a_head_goes_on_from_what_it_said_itself(
    pair: Pair, temperature: float
) -> None:
    drafter = opened(pair, TEXT, temperature, tree="chain", num_tokens=3)
    [before] = drafter.propose([Query("r", len(TEXT), 8)])
    first = before.tokens.tolist()
    # Its own chain, one of another drafter, and one that goes on from a part of that.
    for path in (first[:1], [4, 30, 2], [4, 30], [4, 30, 7, 1]):
        [proposal] = drafter.propose([Query("r", len(TEXT), 8, tuple(path))])
        proposal.check(published.VOCAB)
        if pair.name not in GOES_ON:
            # Of one pass there is left what stands behind its own chain.
            own = first[len(path) :] if first[: len(path)] == path else []
            assert proposal.tokens.tolist() == own
            continue
        drafted: list[int] = []
        for token in proposal.tokens.tolist():
            assert token == chosen(pair, TEXT, [*path, *drafted], temperature)
            drafted.append(token)
        assert len(drafted) == 3
    [again] = drafter.propose([Query("r", len(TEXT), 8)])
    assert again.tokens.tolist() == first
    # The text goes on, and has features of its own.
    tokens = tell(drafter, pair, TEXT, [4, 30])
    [proposal] = drafter.propose([Query("r", len(tokens), 8, (9,))])
    for place, token in enumerate(proposal.tokens.tolist()):
        path = [9, *proposal.tokens.tolist()[:place]]
        assert token == chosen(pair, tokens, path, temperature)
    assert (len(proposal.tokens) == 3) == (pair.name in GOES_ON)


def test_paths_of_several_requests_are_read_together(pair: Pair) -> None:
    alone = {}
    together = pair.drafter(top_k=2, num_tokens=3)
    queries = []
    for index, name in enumerate("abc"):
        tokens = TEXT[: 6 + index]
        request = DraftRequest(name, np.array(tokens, dtype=np.int32), 3, 0.5 * index, SEED)
        rows = FeatureRows(name, 0, pair.features(tokens)[:-1])
        single = pair.drafter(top_k=2, num_tokens=3)
        for drafter in (single, together):
            drafter.open(request)
            drafter.observe_features([rows])
        [plain] = single.propose([Query(name, len(tokens), 12)])
        path = tuple(plain.tokens.tolist()[:1]) * index
        queries.append(Query(name, len(tokens), 12, path or None))
        [alone[name]] = single.propose([queries[-1]])
    for proposal, name in zip(together.propose(queries), "abc", strict=True):
        assert proposal.tokens.tolist() == alone[name].tokens.tolist()
        assert proposal.parents.tolist() == alone[name].parents.tolist()
        np.testing.assert_allclose(proposal.log_probs, alone[name].log_probs, atol=1e-4)
    assert len(alone["b"].tokens) > 1


def test_behind_what_it_cannot_follow_a_head_says_nothing(pair: Pair) -> None:
    drafter = opened(pair, TEXT)
    for path in ((published.VOCAB,), (-1,), (1,) * 65):
        [proposal] = drafter.propose([Query("r", len(TEXT), 8, path)])
        assert proposal.is_empty
    [proposal] = drafter.propose([Query("r", len(TEXT), 8, (1,))], deadline=0.0)
    assert proposal.is_empty
    drafter.open(DraftRequest("r", np.array(TEXT, dtype=np.int32), 3, 0.0, SEED))
    [proposal] = drafter.propose([Query("r", len(TEXT), 8, (1,))])
    assert proposal.is_empty
