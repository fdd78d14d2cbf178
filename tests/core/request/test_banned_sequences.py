"""Sequences that an answer may not hold, on every branch of a tree."""

from __future__ import annotations

import numpy as np
from draftline.core.arrays import ROOT, UInt32
from draftline.core.request.allowed_tokens import AllowedTokens, BannedSequences, mask_of, unpack
from draftline.core.tree.tree import NO_TREE, TokenTree
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.trees import tree_of

VOCAB = 5


def forbidden(masks: UInt32 | None, num_rows: int) -> list[set[int]]:
    if masks is None:
        return [set()] * num_rows
    return [set(np.flatnonzero(~row).tolist()) for row in unpack(masks, VOCAB)]


def test_each_branch_forbids_what_would_end_a_sequence_on_it() -> None:
    banned = BannedSequences([[1, 2, 3], [2, 4], [4]], VOCAB)
    # The answer is [0, 1]; one branch goes on with 2, the other with 0.
    tree = tree_of([2, 3, 0], [ROOT, 0, ROOT])
    assert forbidden(banned.masks(tree, [0, 1]), 4) == [{4}, {3, 4}, {4}, {4}]
    assert banned.lookback == 2


def test_what_stands_before_the_answer_begins_no_sequence() -> None:
    banned = BannedSequences([[1, 2]], VOCAB)
    assert banned.masks(NO_TREE, []) is None
    assert forbidden(banned.masks(NO_TREE, [1]), 1) == [{2}]


def test_tokens_outside_the_vocabulary_cannot_come() -> None:
    assert BannedSequences([[1, 99]], VOCAB).masks(NO_TREE, [1]) is None


def test_nodes_that_complete_a_sequence_are_cut() -> None:
    rules = AllowedTokens(None, None, 0, None, BannedSequences([[1, 2]], VOCAB))
    tree = tree_of([1, 2, 3, 2], [ROOT, 0, 1, ROOT])
    assert rules.allowed(tree, 0, []).tolist() == [True, False, False, True]
    assert rules.allowed(tree, 1, [1]).tolist() == [True, False, False, False]


def test_a_list_goes_before_a_sequence_where_they_leave_nothing() -> None:
    rules = AllowedTokens(mask_of([2], VOCAB), None, 0, None, BannedSequences([[1, 2]], VOCAB))
    masks = rules.masks(NO_TREE, 1, [1])
    assert forbidden(masks, 1) == [{0, 1, 3, 4}]


sequences = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), max_size=5)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    size = draw(st.integers(0, 6))
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    return tree_of(tokens, [draw(st.integers(ROOT, node - 1)) for node in range(size)])


@given(sequences, st.lists(st.integers(0, VOCAB - 1), max_size=6), trees())
def test_rows_forbid_what_the_text_before_them_alone_forbids(
    banned: list[list[int]], answer: list[int], tree: TokenTree
) -> None:
    rule = BannedSequences(banned, VOCAB)
    paths: list[list[int]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*([] if parent == ROOT else paths[parent]), token])
    expected = []
    for path in [[], *paths]:
        text = [*answer, *path]
        ends = {one[-1] for one in banned if [*text, one[-1]][-len(one) :] == one}
        expected.append(ends)
    assert forbidden(rule.masks(tree, answer), 1 + len(tree)) == expected
    tail = answer[max(len(answer) - rule.lookback, 0) :]
    assert forbidden(rule.masks(tree, tail), 1 + len(tree)) == expected
