"""Token Recycling: what it asks for, whom it learns for, and its drafts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftline.core.errors import ConfigError, DrafterError
from draftline.core.proposals import Commit, DraftRequest, Proposal, Query, TopNextTokens
from draftline.drafters.ngram.token_recycling import TokenRecyclingDrafter, TokenRecyclingOptions


def drafter_of(**options: Any) -> TokenRecyclingDrafter:
    return TokenRecyclingDrafter(options=TokenRecyclingOptions(num_top_next_tokens=2, **options))


def begin(drafter: TokenRecyclingDrafter, name: str, *text: int, **whose: str) -> None:
    tokens = np.array(text, dtype=np.int32)
    drafter.open(DraftRequest(name, tokens, len(text), 0.0, seed=4, **whose))


def propose(
    drafter: TokenRecyclingDrafter, length: int, max_nodes: int = 5, name: str = "r"
) -> Proposal:
    [proposal] = drafter.propose([Query(name, length, max_nodes)])
    proposal.check(50)
    return proposal


def commit(
    drafter: TokenRecyclingDrafter,
    base: int,
    tokens: list[int],
    heard: dict[int, list[int]] | None = None,
    name: str = "r",
) -> None:
    top_next_tokens = None
    if heard is not None:
        ids = np.array(list(heard.values()), dtype=np.int32)
        top_next_tokens = TopNextTokens(np.array(list(heard), dtype=np.int32), ids)
    drafter.observe([Commit(name, base, np.array(tokens, dtype=np.int32), None, top_next_tokens)])


def test_candidates_of_candidates_are_drafted() -> None:
    """Ranks on the way from the root: 0, 00, 1, 000, 01; nodes 4 and 7 were rejected before."""
    drafter = drafter_of()
    begin(drafter, "r", 1)
    assert propose(drafter, 1).tokens.tolist() == []
    commit(drafter, 1, [2, 3], {1: [2, 4], 2: [3, 5], 4: [6, 2], 7: [8, 9]})
    # Nothing is known of 3 yet.
    assert propose(drafter, 3).tokens.tolist() == []
    commit(drafter, 3, [1], {3: [1, 7]})
    proposal = propose(drafter, 4)
    # 1 -> 2 4, 2 -> 3 5, 3 -> 1 7: tree 2, 23, 4, 231, 25.
    assert proposal.tokens.tolist() == [2, 3, 4, 1, 5]
    assert proposal.parents.tolist() == [-1, 0, -1, 1, 0]
    assert proposal.log_probs.tolist() == [0.0] * 5


def test_the_tree_of_a_file_is_drafted_through(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text("[[1], [1, 0], [1, 0, 1]]")
    drafter = drafter_of(tree=str(file))
    begin(drafter, "r", 1)
    commit(drafter, 1, [2, 1], {1: [2, 4], 4: [6, 2], 6: [8, 9]})
    assert propose(drafter, 3).tokens.tolist() == [4, 6, 9]
    assert propose(drafter, 3, max_nodes=2).tokens.tolist() == [4, 6]
    file.write_text("[[2]]")
    with pytest.raises(ConfigError, match="raise num_top_next_tokens"):
        drafter_of(tree=str(file))


def test_below_an_unknown_token_is_nothing() -> None:
    drafter = drafter_of()
    begin(drafter, "r", 1)
    commit(drafter, 1, [1], {1: [9, 1]})
    # Nodes 0, 1 and 1 0 are known; 00, 000, 01 are not. 1 0 is the template's sixth.
    proposal = propose(drafter, 2, max_nodes=6)
    assert proposal.tokens.tolist() == [9, 1, 9]
    assert proposal.parents.tolist() == [-1, -1, 1]


def test_every_proposal_of_nodes_asks_for_the_top_next_tokens_of_the_tree() -> None:
    drafter = drafter_of()
    begin(drafter, "r", 1)
    assert propose(drafter, 1).num_top_next_tokens == 2
    assert propose(drafter, 1).probe is None
    assert propose(drafter, 1, max_nodes=0).num_top_next_tokens == 0
    assert TokenRecyclingOptions().num_top_next_tokens == 8


def test_a_batch_of_different_limits() -> None:
    drafter = drafter_of()
    for name, root in (("a", 1), ("b", 2), ("c", 1), ("d", 1)):
        begin(drafter, name, root)
    commit(drafter, 1, [1], {1: [2, 4], 2: [1, 5]}, name="a")
    queries = [Query("a", 2, 3), Query("b", 1, 1), Query("c", 1, 2), Query("d", 1, 0)]
    found = [proposal.tokens.tolist() for proposal in drafter.propose(queries)]
    assert found == [[2, 1, 4], [1], [2, 1], []]


@pytest.mark.parametrize(
    ("whose", "share", "expected"),
    [
        ({}, True, [2, 4]),
        ({}, False, []),
        ({"namespace": "tenant"}, True, []),
        ({"cache_salt": "x"}, True, []),
    ],
)
def test_requests_learn_for_their_own_namespace_and_salt(
    whose: dict[str, str], share: bool, expected: list[int]
) -> None:
    drafter = drafter_of(share=share)
    begin(drafter, "r", 1)
    commit(drafter, 1, [1], {1: [2, 4]})
    drafter.close("r")
    begin(drafter, "other", 1, **whose)
    assert propose(drafter, 1, name="other").tokens.tolist() == expected


def test_requests_that_are_not_to_be_stored_teach_nobody() -> None:
    drafter = drafter_of()
    begin(drafter, "r", 1, store=False)
    commit(drafter, 1, [1], {1: [2, 4]})
    assert propose(drafter, 2).tokens.tolist() == [2, 4]
    begin(drafter, "other", 1)
    assert propose(drafter, 1, name="other").tokens.tolist() == []


def test_a_request_opened_anew_keeps_nothing_of_its_own_table() -> None:
    drafter = drafter_of(share=False)
    begin(drafter, "r", 1)
    commit(drafter, 1, [1], {1: [2, 4]})
    assert propose(drafter, 2).tokens.tolist() == [2, 4]
    begin(drafter, "r", 1, 1)
    assert propose(drafter, 2).tokens.tolist() == []


def test_the_tables_used_least_recently_are_forgotten() -> None:
    drafter = drafter_of(max_tables=2)

    def known(tenant: str) -> bool:
        begin(drafter, tenant, 1, namespace=tenant)
        return bool(len(propose(drafter, 1, name=tenant).tokens))

    for tenant in ("a", "b"):
        begin(drafter, tenant, 1, namespace=tenant)
        commit(drafter, 1, [1], {1: [2, 4]}, name=tenant)
    assert known("a")
    assert not known("c")
    assert known("a")
    assert not known("b")


def test_other_answers_than_it_asked_for_are_refused() -> None:
    drafter = drafter_of()
    begin(drafter, "r", 1)
    with pytest.raises(DrafterError, match="2 were wanted"):
        commit(drafter, 1, [2], {1: [2, 3, 4]})


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_top_next_tokens", 0), ("num_top_next_tokens", 65), ("share", 1), ("max_tables", 0)],
)
def test_wrong_options_are_named(field: str, value: object) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError) as caught:
        TokenRecyclingOptions(**options)
    assert caught.value.field == field
