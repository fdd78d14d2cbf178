"""ANPD against hand-worked texts and against tables that are counted anew for every token."""

from fractions import Fraction

import numpy as np
import pytest
from draftline.core.errors import ConfigError
from draftline.core.proposals import Commit, DraftRequest, Proposal, Query
from draftline.drafters.ngram.anpd import AnpdDrafter, AnpdOptions
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.occurrences import Row, following, rows_of


def opened(text: list[int], **options: int) -> AnpdDrafter:
    drafter = AnpdDrafter(options=AnpdOptions(**options))
    drafter.open(DraftRequest("r", np.array(text, dtype=np.int32), len(text), 0.0, 0))
    return drafter


def propose(text: list[int], max_nodes: int = 20, **options: int) -> Proposal:
    [proposal] = opened(text, **options).propose([Query("r", len(text), max_nodes)])
    return proposal


def test_each_token_is_chosen_by_its_longest_known_context() -> None:
    # 8 1 2 was followed by 4; 1 2 alone mostly by 3. Then 2 4 -> 5, and nothing follows 5.
    text = [1, 2, 3, 1, 2, 3, 8, 1, 2, 4, 5, 0, 8, 1, 2]
    assert propose(text, num_tokens=3, ngram=4).tokens.tolist() == [4, 5, 0]
    # With pairs for contexts: 1 2 -> 3 (twice of three), then 2 3 -> 8, the later one.
    proposal = propose(text, num_tokens=2, ngram=3)
    assert rows_of(proposal) == [(3, -1, Fraction(2, 3)), (8, 0, Fraction(1, 2))]
    assert proposal.source == "anpd"


def test_of_equally_frequent_tokens_the_latest_wins() -> None:
    assert propose([1, 5, 1, 6, 1], num_tokens=1).tokens.tolist() == [6]
    assert propose([1, 6, 1, 5, 1], num_tokens=1).tokens.tolist() == [5]
    assert propose([1, 6, 1, 6, 1, 5, 1], num_tokens=1, ngram=2).tokens.tolist() == [6]


def test_a_draft_ends_where_no_level_has_an_entry() -> None:
    # After 2 came 9, and after 9 nothing yet.
    assert propose([3, 2, 9]).tokens.tolist() == []
    assert propose([3, 3, 2, 9, 3, 3]).tokens.tolist() == [2, 9, 3, 3, 2, 9, 3]
    assert propose([1, 2, 3]).tokens.tolist() == []


def test_learns_what_is_committed() -> None:
    drafter = opened([1, 2])
    assert drafter.propose([Query("r", 2, 4)])[0].tokens.tolist() == []
    drafter.observe([Commit("r", 2, np.array([3, 1], dtype=np.int32))])
    assert drafter.propose([Query("r", 4, 4)])[0].tokens.tolist() == [2, 3, 1, 2]


def test_what_is_assumed_is_not_counted() -> None:
    drafter = opened([1, 2, 3, 1, 2, 3, 1, 2])

    def behind(*path: int) -> list[int]:
        return drafter.propose([Query("r", 8, 3, path or None)])[0].tokens.tolist()

    assert behind() == [3, 1, 2]
    assert behind(3) == [1, 2, 3]
    # Behind a token that the text does not have nothing is known; behind one more it is again.
    assert behind(8) == []
    assert behind(8, 2) == [3, 1, 2]
    assert behind() == [3, 1, 2]


def test_the_window_bounds_memory() -> None:
    text = np.random.default_rng(1).integers(0, 50, size=3000).tolist()
    small, large = opened(text, window=256), opened(text)
    assert small.memory_bytes < 40_000 < large.memory_bytes < 1_000_000
    small.close("r")
    assert small.memory_bytes == 0


@pytest.mark.parametrize(
    ("field", "options"),
    [("ngram", {"ngram": 1}), ("num_tokens", {"num_tokens": 0}), ("window", {"window": True})],
)
def test_wrong_options_are_named(field: str, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        AnpdOptions(**options)
    assert caught.value.field == field


def reference(text: list[int], ngram: int, num_tokens: int) -> list[Row]:
    """The definition: after each token, the longest level that has an entry."""
    context = list(text)
    rows: list[Row] = []
    while len(rows) < num_tokens:
        levels = [following([text], context[-size:]) for size in range(ngram - 1, 0, -1)]
        known = next((level for level in levels if level), None)
        if known is None:
            break
        total = sum(one.count for one in known)
        rows.append((known[0].token, len(rows) - 1, Fraction(known[0].count, total)))
        context.append(known[0].token)
    return rows


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(2, 6), st.integers(0, 9))
def test_equals_tables_of_every_level(text: list[int], ngram: int, max_nodes: int) -> None:
    proposal = propose(text, max_nodes, ngram=ngram)
    assert rows_of(proposal) == reference(text, ngram, min(7, max_nodes))
