"""Suffix counts against a count of every string in the texts."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from draftline.drafters.suffix.automaton import (
    BEST_EDGE,
    COUNT,
    LAST_END,
    NONE,
    ROOT_STATE,
    TARGET,
    TOKEN,
    Automaton,
    find_edge,
)
from draftline.drafters.suffix.counts import RecentCounts, SuffixCounts
from hypothesis import given
from hypothesis import strategies as st

DEPTH = 5
texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=4)


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def counted(written: list[list[int]], max_depth: int) -> SuffixCounts:
    counts = SuffixCounts(max_depth)
    for text in written:
        counts.start_text()
        counts.append(int32(text))
    return counts


def occurrences(written: list[list[int]], max_depth: int) -> tuple[Counter, dict]:
    """By string: how often it stands in the texts, and where it ends last."""
    found: Counter[tuple[int, ...]] = Counter()
    last_end = {}
    end = 0
    for text in written:
        for stop in range(1, len(text) + 1):
            for start in range(max(0, stop - max_depth), stop):
                string = tuple(text[start:stop])
                found[string] += 1
                last_end[string] = end
            end += 1
    return found, last_end


def state_of(automaton: Automaton, string: tuple[int, ...]) -> int | None:
    state = ROOT_STATE
    for token in string:
        edge = find_edge(automaton, state, token)
        if edge == NONE:
            return None
        state = automaton[1][edge, TARGET]
    return int(state)


def check_counts(counts: SuffixCounts, written: list[list[int]], max_depth: int) -> None:
    automaton = counts.automaton
    found, last_end = occurrences(written, max_depth)
    for string, count in found.items():
        state = state_of(automaton, string)
        assert state is not None
        assert automaton[0][state, [COUNT, LAST_END]].tolist() == [count, last_end[string]]
        following = {
            token: (found[*string, token], last_end[*string, token])
            for token in range(4)
            if (*string, token) in found
        }
        best = automaton[0][state, BEST_EDGE]
        if len(string) < max_depth:
            best_token = None if best == NONE else automaton[1][best, TOKEN]
            assert best_token == max(following, key=lambda t: following[t], default=None)
        for token in range(4):
            if len(string) < max_depth and token not in following:
                assert state_of(automaton, (*string, token)) is None


@given(texts)
def test_every_string_is_counted(written: list[list[int]]) -> None:
    counts = counted(written, DEPTH)
    counts.check_integrity()
    assert counts.num_tokens == sum(map(len, written))
    check_counts(counts, written, DEPTH)


def test_banana() -> None:
    # b=0 a=1 n=2
    counts = counted([[0, 1, 2, 1, 2, 1]], max_depth=3)
    states, edges, _, _ = counts.automaton
    strings = {(1,): 3, (2,): 2, (0,): 1, (1, 2): 2, (2, 1): 2, (1, 2, 1): 2, (0, 1, 2): 1}
    for string, count in strings.items():
        assert states[state_of(counts.automaton, string), COUNT] == count
    assert state_of(counts.automaton, (2, 2)) is None
    # n always follows after "a" where anything does.
    best = states[state_of(counts.automaton, (1,)), BEST_EDGE]
    assert edges[best, TOKEN] == 2


@pytest.mark.parametrize("length", [63, 64, 65, 1000])
def test_a_run_of_one_token(length: int) -> None:
    counts = counted([[7] * length], max_depth=40)
    counts.check_integrity()
    for size in (1, 2, 39, 40):
        state = state_of(counts.automaton, (7,) * size)
        assert counts.automaton[0][state, COUNT] == length - size + 1


def test_arrays_grow_without_a_change() -> None:
    rng = np.random.default_rng(3)
    text = rng.integers(0, 4, size=700).tolist()
    counts = counted([text], DEPTH)
    counts.check_integrity()
    check_counts(counts, [text], DEPTH)
    assert counts.memory_bytes <= 112 * 1024 + 200


def test_what_was_written_wrongly_is_noticed() -> None:
    for array, row, column, value in [(0, 1, COUNT, 99), (1, 0, TARGET, 0), (1, 0, TOKEN, 1)]:
        counts = counted([[0, 1, 0, 1, 2]], DEPTH)
        counts.check_integrity()
        counts.automaton[array][row, column] = value
        with pytest.raises(AssertionError):
            counts.check_integrity()


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), max_size=9)), max_size=12),
    st.integers(2, 12),
)
def test_recent_counts_hold_the_latest_tokens(
    pieces: list[tuple[bool, list[int]]], max_tokens: int
) -> None:
    """Where the texts begin among all tokens, and what is left of them."""
    counts = RecentCounts(max_tokens, DEPTH)
    written: list[int] = []
    starts = {0}
    for is_new, piece in pieces:
        if is_new:
            counts.start_text()
            starts.add(len(written))
        counts.append(int32(piece))
        written += piece
    counts.check_integrity()
    half = max_tokens // 2
    oldest = max(0, (max(0, len(written) - 1) // half - 1) * half)
    cuts = sorted({oldest, len(written)} | {start for start in starts if start > oldest})
    left = [written[start:stop] for start, stop in pairwise(cuts)]
    same = counted(left, DEPTH)
    assert counts._serving.num_tokens == same.num_tokens == len(written) - oldest
    assert min(len(written), half) <= same.num_tokens <= max_tokens
    check_counts(counts._serving, left, DEPTH)
