from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import product

import numpy as np
import pytest
from draftline.core.interfaces import Subtree
from draftline.retrieval_store.search.continuation import BACK_OFF, PRIOR
from draftline.retrieval_store.search.lookup import ENOUGH_COUNT, LookupRule, SegmentLookup
from draftline.retrieval_store.segment.segment import DEPTH, MAX_CONTINUATION
from draftline.retrieval_store.segment.wide_nodes import MOST_CHILDREN, WIDE
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.segments import context, make_segment

Corpus = list[list[int]]
Path = tuple[int, ...]


def paths(subtree: Subtree) -> dict[Path, float]:
    """Each node's path from the root, with its path log-probability."""
    found: list[tuple[Path, float]] = []
    nodes = zip(subtree.tokens, subtree.parents, subtree.log_probs, strict=True)
    for index, (token, parent, log_prob) in enumerate(nodes):
        assert parent < index
        path, total = found[parent] if parent >= 0 else ((), 0.0)
        found.append(((*path, int(token)), total + float(log_prob)))
    assert len(dict(found)) == len(found), "a path twice"
    return dict(found)


class Reference:
    """Counts every window of the documents one by one."""

    def __init__(self, documents: Corpus) -> None:
        self.counts: Counter[Path] = Counter(
            tuple(document[start:end])
            for document in documents
            for start in range(len(document))
            for end in range(start + 1, min(start + DEPTH, len(document)) + 1)
        )

    def suffixes(self, tokens: list[int]) -> list[Path]:
        lengths = range(min(16, len(tokens)), 1, -1)
        stored = [tuple(tokens[-length:]) for length in lengths if length <= len(tokens)]
        longest = next((path for path in stored if self.counts[path]), None)
        often = next((path for path in stored if self.counts[path] >= ENOUGH_COUNT), None)
        if longest is None:
            return []
        return [longest] if often in (None, longest) else [longest, often]

    def prob(self, suffixes: list[Path], path: Path, token: int) -> float:
        lower = 0.0
        for suffix in reversed(suffixes):
            count, prior = self.counts[suffix + path], PRIOR / len(suffix + path)
            mixed = prior * lower * (BACK_OFF if suffix != suffixes[-1] else 0.0)
            share = (self.counts[(*suffix, *path, token)] + mixed) / (count + prior)
            lower = share if count or suffix == suffixes[-1] else BACK_OFF * lower
        return lower

    def best(self, tokens: list[int], vocab_size: int, budget: int) -> tuple[int, dict]:
        suffixes = self.suffixes(tokens)
        found: dict[Path, float] = {}
        frontier: list[tuple[Path, float]] = [((), 0.0)] if suffixes else []
        while frontier:
            path, total = frontier.pop()
            for token in range(vocab_size if len(path) < MAX_CONTINUATION else 0):
                prob = self.prob(suffixes, path, token)
                if prob > 0:
                    found[*path, token] = total + math.log(prob)
                    frontier.append(((*path, token), found[*path, token]))
        best = sorted(found.items(), key=lambda entry: -entry[1])[:budget]
        return len(suffixes[0]) if suffixes else 0, {"all": found, "best": best}


VOCAB = 3
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)
corpora = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=25), max_size=4)


@given(corpora, corpora, tokens, st.integers(0, 12))
def test_equals_the_brute_force_reference(
    own: Corpus, shared: Corpus, text: list[int], budget: int
) -> None:
    segments = {
        "tenant": [make_segment(own, VOCAB)],
        "shared": [make_segment([document], VOCAB) for document in shared],
    }
    lookup = SegmentLookup(segments)
    subtree = lookup.lookup([context(*text)], ["tenant"], [budget])[0]
    match_len, wanted = Reference(own + shared).best(text, VOCAB, budget)
    found = paths(subtree)
    assert subtree.match_len == (match_len if budget else 0)
    assert len(found) == min(budget, len(wanted["all"]))
    for path, log_prob in found.items():
        assert log_prob == pytest.approx(wanted["all"][path], abs=1e-4)
    # Equally probable paths may be exchanged for one another, never for a less probable one.
    best = [log_prob for _, log_prob in wanted["best"]]
    assert sorted(found.values(), reverse=True) == pytest.approx(best, abs=1e-4)


def test_worked_example() -> None:
    """1 2 is followed by 3 twice and by 4 once; 3 by 5 and by 6."""
    lookup = SegmentLookup({"shared": [make_segment([[1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 4]])]})
    subtree = lookup.lookup([context(9, 1, 2)], ["shared"], [4])[0]
    prior, deeper = PRIOR / 2, PRIOR / 3
    assert subtree.match_len == 2
    assert subtree.tokens.tolist() == [3, 4, 5, 6]
    assert subtree.parents.tolist() == [-1, -1, 0, 0]
    probs = [2 / (3 + prior), 1 / (3 + prior), 1 / (2 + deeper), 1 / (2 + deeper)]
    assert np.exp(subtree.log_probs).tolist() == pytest.approx(probs)
    assert [array.dtype for array in (subtree.tokens, subtree.parents)] == [np.int32, np.int32]
    assert subtree.log_probs.dtype == np.float32


COUNTS_OF_3 = LookupRule(enough_count=1, prior=0.0, max_depth=3)


@given(corpora, tokens, st.integers(1, 12))
def test_counts_alone_give_the_most_frequent_prefixes(
    documents: Corpus, text: list[int], budget: int
) -> None:
    """REST: all prefixes of what follows the longest match, counted one by one."""
    lookup = SegmentLookup({"shared": [make_segment(documents, VOCAB)]}, COUNTS_OF_3)
    subtree = lookup.lookup([context(*text)], ["shared"], [budget])[0]
    reference = Reference(documents)
    suffix = next(iter(reference.suffixes(text)), None)
    wanted = {
        path: reference.counts[suffix + path]
        for length in (1, 2, 3)
        for path in product(range(VOCAB), repeat=length)
        if suffix is not None and reference.counts[suffix + path]
    }
    scale = reference.counts[suffix] if suffix is not None else 0
    found = {path: math.exp(value) * scale for path, value in paths(subtree).items()}
    assert found == pytest.approx({path: wanted[path] for path in found}, rel=1e-4)
    best = sorted(wanted.values(), reverse=True)[:budget]
    assert sorted(map(round, found.values()), reverse=True) == best


@pytest.mark.parametrize("most", [3, WIDE + 5])
def test_only_the_first_hits_may_count(most: int) -> None:
    """In the order of what follows: of so many hits after 1 2, `most` have lower tokens."""
    documents = [[1, 2, 3 + place // (most - 1)] for place in range(4 * (most - 1))]
    segment = make_segment(documents, 10)
    lookup = SegmentLookup({"shared": [segment]}, LookupRule(1, 0.0, most, 2))
    subtree = lookup.lookup([context(1, 2)], ["shared"], [8])[0]
    assert subtree.tokens.tolist() == [3, 4]
    assert np.exp(subtree.log_probs).tolist() == pytest.approx([1 - 1 / most, 1 / most])


def test_a_rare_long_match_is_helped_by_a_frequent_shorter_one() -> None:
    often = [[1, 2, 3]] * ENOUGH_COUNT
    lookup = SegmentLookup({"shared": [make_segment([[7, 1, 2, 4], *often])]})
    subtree = lookup.lookup([context(7, 1, 2)], ["shared"], [8])[0]
    assert subtree.match_len == 3
    assert sorted(subtree.tokens.tolist()) == [3, 4]


def test_matches_end_at_the_border_of_a_document() -> None:
    lookup = SegmentLookup({"shared": [make_segment([[1, 2], [3, 4]])]})
    ask = partial(lookup.lookup, namespaces=["shared"], max_nodes=[8])
    assert len(ask([context(2, 3)])[0].tokens) == 0
    assert len(ask([context(1, 2)])[0].tokens) == 0


def test_a_tenant_reads_its_own_data_and_the_shared_only() -> None:
    lookup = SegmentLookup(
        {
            "shared": [make_segment([[1, 2, 10]])],
            "one": [make_segment([[1, 2, 11]])],
            "two": [make_segment([[1, 2, 12]])],
        }
    )
    names = ["one", "two", "shared", "unknown"]
    answers = lookup.lookup([context(1, 2)] * 4, names, [8] * 4)
    seen = [set(answer.tokens.tolist()) for answer in answers]
    assert seen == [{10, 11}, {10, 12}, {10}, {10}]


@pytest.mark.parametrize("text", [(), (1,), (1, 31), (1, 100), (-1, -1), (2**31 - 1, 5)])
def test_contexts_that_cannot_match(text: tuple[int, ...]) -> None:
    lookup = SegmentLookup({"shared": [make_segment([[1, 2, 3]])]})
    subtree = lookup.lookup([context(*text)], ["shared"], [8])[0]
    assert (len(subtree.tokens), subtree.match_len) == (0, 0)


def wide_documents(common: int, rare: int) -> Corpus:
    """0 0 is followed by 1 `common` times, and once each by `rare` others."""
    return [[0, 0, 1, 2]] * common + [[0, 0, 3 + token] for token in range(rare)]


@pytest.mark.parametrize(("common", "rare"), [(40, WIDE - 41), (40, WIDE - 40), (200, 40)])
def test_wide_nodes_have_the_children_of_a_share(common: int, rare: int) -> None:
    """All children up to `WIDE` suffixes; above, only those of one in `MOST_CHILDREN`."""
    segment = make_segment(wide_documents(common, rare), vocab_size=200)
    subtree = SegmentLookup({"shared": [segment]}).lookup([context(0, 0)], ["shared"], [300])[0]
    size = common + rare
    wanted = {(1,): common / (size + PRIOR / 2)}
    if size <= MOST_CHILDREN:
        wanted |= {(3 + token,): 1 / (size + PRIOR / 2) for token in range(rare)}
    below = PRIOR / 3
    wanted[1, 2] = wanted[1,] * common / (common + below)
    found = {path: math.exp(log_prob) for path, log_prob in paths(subtree).items()}
    assert found == pytest.approx(wanted, rel=1e-5)


@given(st.lists(st.lists(st.integers(0, 2), max_size=60), max_size=12), tokens, st.integers(1, 20))
def test_wide_nodes_equal_the_reference(stored: Corpus, text: list[int], budget: int) -> None:
    """Three tokens repeated: wide nodes, whose children are all frequent enough."""
    corpus = [document * 8 for document in stored]
    lookup = SegmentLookup({"shared": [make_segment(corpus, VOCAB)]})
    found = paths(lookup.lookup([context(*text)], ["shared"], [budget])[0])
    reference = Reference(corpus)
    suffixes = reference.suffixes(text)
    for path, log_prob in found.items():
        probs = [reference.prob(suffixes, path[:depth], path[depth]) for depth in range(len(path))]
        assert log_prob == pytest.approx(sum(map(math.log, probs)), abs=1e-4)
