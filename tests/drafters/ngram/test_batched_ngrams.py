"""Drafts for several requests in one call against one request at a time in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from draftline.core.arrays import Int32
from draftline.core.proposals import Commit, DraftRequest, Proposal, Query
from draftline.core.tree.merge import ProposalTrie
from draftline.drafters.ngram import prompt_lookup
from draftline.drafters.ngram.lookahead import CandidatePool
from draftline.drafters.ngram.prompt_lookup import (
    MATCHES_TRIED_PER_LENGTH,
    PromptLookupDrafter,
    PromptLookupOptions,
)
from draftline.drafters.spectra.drafter import SpectraDrafter, SpectraOptions
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.spectra_reference import PlainSpectra


def ids(tokens: Sequence[int]) -> Int32:
    return np.array(tokens, dtype=np.int32)


def assert_alike(found: Proposal, expected: Proposal) -> None:
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.parents.tolist() == expected.parents.tolist()
    assert found.log_probs.tolist() == expected.log_probs.tolist()


def looked_up(text: list[int], options: PromptLookupOptions, max_nodes: int) -> Proposal:
    """Every earlier place of every suffix, searched one by one."""
    trie, num_found = ProposalTrie(max_nodes), 0
    oldest = max(0, len(text) - options.window)
    for length in range(options.max_ngram, options.min_ngram - 1, -1):
        ends = [
            end
            for end in range(len(text) - 2, max(oldest, length - 1) - 1, -1)
            if len(text) >= length and text[end + 1 - length : end + 1] == text[-length:]
        ]
        for end in ends[:MATCHES_TRIED_PER_LENGTH]:
            num_found += trie.add(text[end + 1 : end + 1 + options.num_tokens]) > 0
            if trie.is_full or num_found == options.num_matches:
                return trie.proposal("prompt_lookup")
    return trie.proposal("prompt_lookup")


@st.composite
def texts(draw: st.DrawFn, vocab: int) -> list[int]:
    """Long ones, too, which outgrow arrays and tables."""
    seed, length = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([1, 2, 9, 90, 900]))
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


@given(st.data(), st.sampled_from([2, 6, 60]), st.sampled_from([7, 40, 4000]))
def test_prompt_lookup_finds_what_a_plain_search_finds(
    data: st.DataObject, vocab: int, window: int
) -> None:
    max_ngram = data.draw(st.integers(1, 4))
    options = PromptLookupOptions(
        max_ngram=max_ngram,
        min_ngram=data.draw(st.integers(1, max_ngram)),
        num_tokens=data.draw(st.integers(1, 6)),
        num_matches=data.draw(st.integers(1, 4)),
        window=window,
    )
    drafter = PromptLookupDrafter(options=options)
    known = [data.draw(texts(vocab)) for _ in range(data.draw(st.integers(1, 3)))]
    for index, text in enumerate(known):
        drafter.open(DraftRequest(str(index), ids(text), len(text), 0.0, 0))
    for _ in range(3):
        sizes = [data.draw(st.integers(0, 20)) for _ in known]
        queries = [
            Query(str(index), len(text), size)
            for index, (text, size) in enumerate(zip(known, sizes, strict=True))
        ]
        for found, text, size in zip(drafter.propose(queries), known, sizes, strict=True):
            assert_alike(found, looked_up(text, options, size))
        commits = []
        # Of one request perhaps two commits in one message.
        for index in data.draw(st.lists(st.integers(0, len(known) - 1), max_size=4)):
            tokens = data.draw(texts(vocab))
            commits.append(Commit(str(index), len(known[index]), ids(tokens)))
            known[index] += tokens
        drafter.observe(commits)


def test_a_table_that_is_full_forgets_what_lies_before_the_window() -> None:
    drafter = PromptLookupDrafter(options=PromptLookupOptions(window=50))
    text = np.random.default_rng(0).permutation(20 * prompt_lookup.FIRST_ROOM).tolist()
    drafter.open(DraftRequest("r", ids(text[:1]), 1, 0.0, 0))
    before = drafter.memory_bytes
    for start in range(1, len(text), 5):
        drafter.observe([Commit("r", start, ids(text[start : start + 5]))])
    # Of the text itself 4 bytes, and as many for each of three lengths; room is half as much again.
    assert drafter.memory_bytes < 4 * before + 1.5 * 16 * len(text)


SPECTRA = st.builds(
    SpectraOptions,
    ngram=st.integers(3, 5),
    window=st.sampled_from([1, 3]),
    max_guesses=st.sampled_from([1, 3, 15]),
    guess_len=st.sampled_from([0, 5, 16]),
    capacity=st.sampled_from([1, 2, 15]),
    max_keys=st.sampled_from([1, 3, 20, 65536]),
    refine_threshold=st.just(0.0),
    seed_from_prompt=st.booleans(),
    learn_committed=st.booleans(),
    sub_ngrams=st.booleans(),
    all_offsets=st.booleans(),
    keep_prefixes=st.booleans(),
    forward_first=st.booleans(),
    forward=st.booleans(),
    backward=st.booleans(),
)


@given(SPECTRA, st.sampled_from([2, 6, 60]), st.data())
def test_spectra_guesses_what_its_plain_dictionaries_guess(
    options: SpectraOptions, vocab: int, data: st.DataObject
) -> None:
    drafter = SpectraDrafter(options=options)
    known = [data.draw(texts(vocab)) for _ in range(data.draw(st.integers(1, 3)))]
    plain = [PlainSpectra(options) for _ in known]
    pools = [
        CandidatePool(options.ngram, options.window, ids(text), np.random.default_rng([index, 0]))
        for index, text in enumerate(known)
    ]
    for index, text in enumerate(known):
        prompt_len = (len(text) + 1) // 2
        drafter.open(DraftRequest(str(index), ids(text), prompt_len, 0.0, index))
        plain[index].extend(text[:prompt_len], learn=options.seed_from_prompt)
        plain[index].extend(text[prompt_len:], learn=options.learn_committed)
    for _ in range(5):
        queries = [Query(str(index), len(text), 20) for index, text in enumerate(known)]
        commits = []
        for index, found in enumerate(drafter.propose(queries)):
            assert_alike(found, plain[index].propose(20))
            assert found.probe is not None
            root, tokens = known[index][-1], data.draw(texts(vocab))[:9]
            answers = ids(data.draw(texts(vocab))[:1] * len(found.probe.wanted))
            assert found.probe.tokens.tolist() == pools[index].probe(1).tokens.tolist()
            plain[index].learn_ngrams(pools[index].advance(root, answers.tolist()))
            commits.append(
                Commit(
                    str(index), len(known[index]), ids(tokens), np.repeat(answers[:, None], 8, 1)
                )
            )
            plain[index].extend(tokens, learn=options.learn_committed)
            known[index] += tokens
        drafter.observe(commits)


@given(st.data(), st.sampled_from([0.3, 1.0]))
def test_a_pool_explores_alike_in_any_company(data: st.DataObject, threshold: float) -> None:
    """Requests of one message, some of which got no answers, and each of them alone."""
    options = SpectraOptions(ngram=3, window=2, refine_threshold=threshold)
    known = [data.draw(texts(6)) for _ in range(3)]
    together, alone = SpectraDrafter(options=options), [SpectraDrafter(options=options)] * 3
    for index, text in enumerate(known):
        request = DraftRequest(str(index), ids(text), len(text), 0.0, 100 + index)
        together.open(request)
        alone[index] = SpectraDrafter(options=options)
        alone[index].open(request)
    for _ in range(4):
        queries = [Query(str(index), len(text), 9) for index, text in enumerate(known)]
        proposals = together.propose(queries)
        commits = []
        for index, found in enumerate(proposals):
            [expected] = alone[index].propose([queries[index]])
            assert_alike(found, expected)
            assert found.probe is not None
            assert expected.probe is not None
            assert found.probe.tokens.tolist() == expected.probe.tokens.tolist()
            seed = data.draw(st.integers(0, 2**32 - 1))
            shape = (len(found.probe.wanted), data.draw(st.sampled_from([1, 8])))
            answers = np.random.default_rng(seed).integers(0, 9, shape).astype(np.int32)
            tokens = ids(data.draw(texts(6))[:9])
            commit = Commit(str(index), len(known[index]), tokens, answers if seed % 3 else None)
            commits.append(commit)
            alone[index].observe([commit])
            known[index] += tokens.tolist()
        together.observe(commits)
