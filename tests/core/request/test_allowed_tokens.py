"""Lists of tokens and least lengths, node by node; penalties along a path; stops."""

from __future__ import annotations

import numpy as np
from draftline.core.arrays import ROOT, UInt32
from draftline.core.request.allowed_tokens import AllowedTokens, mask_of, unpack
from draftline.core.request.request import Request, RequestState, RequestStats
from draftline.core.request.sampling_params import SamplingParams
from draftline.core.request.stop import StopRule
from draftline.core.sampling import build_edits, counts_of
from draftline.core.tree.tree import NO_TREE
from support.inputs.letters import Letters
from support.inputs.trees import tree_of

VOCAB = 40


def sets(masks: UInt32 | None) -> list[set[int]]:
    assert masks is not None
    return [set(np.flatnonzero(row).tolist()) for row in unpack(masks, VOCAB)]


TREE = tree_of([5, 6, 7], [ROOT, 0, ROOT])


def test_a_list_is_one_row_and_cuts_whole_branches() -> None:
    rules = AllowedTokens(mask_of([6, 7], VOCAB), None, 0, None)
    assert sets(rules.masks(TREE, 3)) == [{6, 7}]
    assert rules.allowed(TREE, 3).tolist() == [False, False, True]
    assert rules.allowed(NO_TREE, 3).tolist() == []


def test_the_end_is_forbidden_until_the_least_length() -> None:
    rules = AllowedTokens(None, mask_of([0, 9], VOCAB), 3, None)
    every = set(range(VOCAB))
    # The answer has one token: after the root the second is chosen, after node 1 the fourth.
    root, first, second, third = sets(rules.masks(TREE, 1))
    assert root == first == third == every - {0, 9}
    assert second == every
    assert rules.masks(TREE, 3) is None


def test_an_answer_that_cannot_go_on_may_end_before_its_least_length() -> None:
    rules = AllowedTokens(None, mask_of([0], VOCAB), 9, None)
    # A form that is complete: nothing but token 0 is allowed.
    assert sets(rules.masks(NO_TREE, 1, grammar_masks=mask_of([0], VOCAB)[None])) == [{0}]


def state_of(params: SamplingParams, prompt: list[int], answer: list[int]) -> RequestState:
    request = Request("r", np.array(prompt, dtype=np.int32), params, 0, 9, lambda _: None)
    stop = StopRule(params, (), 9, Letters())
    state = RequestState(request, stop, RequestStats(arrival_time=0.0))
    state.append(answer)
    return state


def test_penalties_count_the_path_of_each_row() -> None:
    state = state_of(SamplingParams(presence_penalty=1.0), [3, 5, 3], [5, 8])
    edits = build_edits(state, tree_of([5, 6, 5, 3], [ROOT, 0, 1, ROOT]), 7)
    assert edits is not None
    assert (edits.first_row, edits.num_rows, edits.mask) == (7, 5, None)
    penalties = edits.penalties
    assert penalties is not None
    tokens = penalties.tokens.tolist()
    assert sorted(tokens) == [3, 5, 6, 8]
    assert dict(zip(tokens, penalties.in_prompt.tolist(), strict=True)) == {
        3: True, 5: True, 8: False, 6: False,
    }  # fmt: skip
    rows = [dict(zip(tokens, row, strict=True)) for row in counts_of(penalties, 5).tolist()]
    assert rows == [
        {3: 0, 5: 1, 8: 1, 6: 0},
        {3: 0, 5: 2, 8: 1, 6: 0},
        {3: 0, 5: 2, 8: 1, 6: 1},
        {3: 0, 5: 3, 8: 1, 6: 1},
        {3: 1, 5: 1, 8: 1, 6: 0},
    ]


def test_a_request_without_changes_has_no_edits() -> None:
    assert build_edits(state_of(SamplingParams(top_k=3), [1], [2]), TREE, 0) is None


def test_no_text_stops_an_answer_before_its_least_length() -> None:
    params = SamplingParams(stop=("bc", "de"), min_tokens=3)
    rule = StopRule(params, (), 9, Letters())
    advance = rule.advance([0, 1, 2, 3, 4, 5])
    # "bc" ends at the third token; "de" begins after it.
    assert (advance.num_tokens, advance.text, advance.finish_reason) == (5, "abc", "stop")
    short = StopRule(SamplingParams(stop=("b",), min_tokens=3), (), 3, Letters())
    assert short.advance([0, 1, 2])[1:] == ("abc", "length", None)
