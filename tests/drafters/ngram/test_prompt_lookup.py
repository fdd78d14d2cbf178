"""Prompt lookup against hand-worked texts."""

import numpy as np
import pytest
from draftline.core.errors import ConfigError, DrafterError
from draftline.core.proposals import Commit, DraftRequest, Proposal, Query
from draftline.drafters.ngram.prompt_lookup import PromptLookupDrafter, PromptLookupOptions
from hypothesis import given
from hypothesis import strategies as st


def propose(text: list[int], max_nodes: int = 20, **options: int) -> Proposal:
    drafter = PromptLookupDrafter(options=PromptLookupOptions(**options))
    drafter.open(DraftRequest("r", np.array(text, dtype=np.int32), len(text), 0.0, 0))
    [proposal] = drafter.propose([Query("r", len(text), max_nodes)])
    return proposal


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    # Suffix 2 3 stood before 7; the later 3 alone stood before 9.
    proposal = propose([2, 3, 7, 8, 3, 9, 2, 3], num_matches=1, num_tokens=3)
    assert proposal.tokens.tolist() == [7, 8, 3]
    assert proposal.parents.tolist() == [-1, 0, 1]
    assert proposal.source == "prompt_lookup"


def test_the_latest_of_equal_matches_wins() -> None:
    assert propose([1, 5, 1, 6, 1], num_matches=1, num_tokens=2).tokens.tolist() == [6, 1]


def test_a_continuation_ends_with_the_text() -> None:
    assert propose([4, 4], num_matches=1).tokens.tolist() == [4]


def test_several_continuations_form_a_tree() -> None:
    # After 1: latest 6 1, then 5 1.
    proposal = propose([1, 5, 1, 6, 1], max_ngram=1, num_matches=2, num_tokens=2)
    assert proposal.tokens.tolist() == [6, 1, 5, 1]
    assert proposal.parents.tolist() == [-1, 0, -1, 2]


def test_equal_continuations_count_once() -> None:
    # After 1: 5 twice (the same), then 6.
    text = [1, 6, 9, 1, 5, 9, 1, 5, 9, 1]
    proposal = propose(text, max_ngram=1, num_matches=2, num_tokens=1)
    assert proposal.tokens.tolist() == [5, 6]


def test_short_suffixes_can_be_ruled_out() -> None:
    assert propose([3, 7, 3]).tokens.tolist() == [7, 3]
    assert propose([3, 7, 3], min_ngram=2).tokens.tolist() == []


def test_what_lies_outside_the_window_is_forgotten() -> None:
    text = [1, 2, 3, 4, 5, 1]
    assert propose(text, window=6).tokens.tolist() == [2, 3, 4, 5, 1]
    assert propose(text, window=5).tokens.tolist() == []


def test_learns_what_is_committed() -> None:
    drafter = PromptLookupDrafter()
    drafter.open(DraftRequest("r", np.array([1, 2], dtype=np.int32), 2, 0.0, 0))
    assert drafter.propose([Query("r", 2, 4)])[0].tokens.tolist() == []
    drafter.observe([Commit("r", 2, np.array([3, 1], dtype=np.int32))])
    assert drafter.propose([Query("r", 4, 4)])[0].tokens.tolist() == [2, 3, 1]


def test_an_empty_request_is_refused() -> None:
    with pytest.raises(DrafterError, match="without a token"):
        PromptLookupDrafter().open(DraftRequest("r", np.empty(0, dtype=np.int32), 0, 0.0, 0))


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("max_ngram", {"max_ngram": 0}),
        ("min_ngram", {"min_ngram": 4, "max_ngram": 3}),
        ("num_tokens", {"num_tokens": True}),
        ("num_matches", {"num_matches": 1.5}),
        ("window", {"window": 2}),
    ],
)
def test_wrong_options_are_named(field: str, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        PromptLookupOptions(**options)
    assert caught.value.field == field


def reference(text: list[int], num_tokens: int, window: int) -> list[int]:
    """The definition by rescan: longest n first, then the latest start."""
    for length in (3, 2, 1):
        suffix = text[-length:]
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == suffix and start + length > len(text) - window:
                return text[start + length : start + length + num_tokens]
    return []


@given(st.lists(st.integers(0, 2), min_size=3, max_size=40), st.integers(3, 50))
def test_equals_a_rescan_of_the_text(text: list[int], window: int) -> None:
    proposal = propose(text, num_matches=1, num_tokens=4, window=window)
    assert proposal.tokens.tolist() == reference(text, 4, window)
