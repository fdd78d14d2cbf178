"""What every drafter promises, whatever it proposes."""

from collections.abc import Callable
from typing import Any

import pytest
from draftline.core.errors import DrafterError
from draftline.core.interfaces import Drafter
from draftline.core.proposals import Query
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.small_drafters import DRAFTERS, VOCAB, commit_of, request, same

every_drafter = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS.keys())

texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
steps = st.lists(texts, max_size=6)
temperatures = st.sampled_from([0.0, 0.8])
budgets = st.integers(0, 20)


@every_drafter
@given(prompt=texts, commits=steps, temperature=temperatures, budget=budgets)
def test_proposals_are_valid_bounded_and_repeatable(
    make: Callable[[], Drafter],
    prompt: list[int],
    commits: list[list[int]],
    temperature: float,
    budget: int,
) -> None:
    drafter = make()
    drafter.open(request("r", prompt, len(prompt), temperature))
    done = len(prompt)
    for tokens in [*commits, []]:
        [proposal] = drafter.propose([Query("r", done, budget)])
        proposal.check(VOCAB)
        assert len(proposal.tokens) <= budget
        assert proposal.source == drafter.name
        if proposal.probe is not None:
            proposal.probe.check(VOCAB + 2, max_rows=256)
        [again] = drafter.propose([Query("r", done, budget)])
        assert same(proposal, again)
        assert again.num_top_next_tokens == proposal.num_top_next_tokens
        assert (again.probe is None) == (proposal.probe is None)
        if again.probe is not None and proposal.probe is not None:
            assert again.probe.tokens.tolist() == proposal.probe.tokens.tolist()
        if tokens:
            drafter.observe([commit_of("r", done, tokens, proposal)])
            done += len(tokens)


@every_drafter
@given(prompt=texts, commits=steps, temperature=temperatures)
def test_reopening_equals_observing(
    make: Callable[[], Drafter], prompt: list[int], commits: list[list[int]], temperature: float
) -> None:
    """Without probe answers, which are lost with the drafter that asked for them."""
    one, other = make(), make()
    one.open(request("r", prompt, len(prompt), temperature))
    text = list(prompt)
    for tokens in commits:
        one.propose([Query("r", len(text), 8)])
        one.observe([commit_of("r", len(text), tokens)])
        text += tokens
    other.open(request("r", [1, 2, 3], 3, temperature))
    other.open(request("r", text, len(prompt), temperature))
    query = Query("r", len(text), 20)
    assert same(one.propose([query])[0], other.propose([query])[0])


@every_drafter
@given(prompts=st.lists(texts, min_size=2, max_size=4), order=st.randoms())
def test_the_order_of_a_batch_does_not_matter(
    make: Callable[[], Drafter], prompts: list[list[int]], order: Any
) -> None:
    drafter = make()
    for index, prompt in enumerate(prompts):
        drafter.open(request(str(index), prompt, len(prompt), 0.8 * (index % 2)))
    queries = [Query(str(index), len(prompt), 9) for index, prompt in enumerate(prompts)]
    expected = {
        query.request_id: proposal
        for query, proposal in zip(queries, drafter.propose(queries), strict=True)
    }
    commits = [commit_of(query.request_id, query.committed_len, [2, 1]) for query in queries]
    order.shuffle(queries)
    order.shuffle(commits)
    for query, proposal in zip(queries, drafter.propose(queries), strict=True):
        assert same(proposal, expected[query.request_id])
    drafter.observe(commits)
    for index, prompt in enumerate(prompts):
        alone = make()
        alone.open(request(str(index), prompt, len(prompt), 0.8 * (index % 2)))
        alone.propose([Query(str(index), len(prompt), 9)])
        alone.observe([commit_of(str(index), len(prompt), [2, 1])])
        query = Query(str(index), len(prompt) + 2, 9)
        assert same(drafter.propose([query])[0], alone.propose([query])[0])


@every_drafter
def test_queries_and_commits_must_fit_the_state(make: Callable[[], Drafter]) -> None:
    drafter = make()
    drafter.open(request("r", [1, 2], 2, 0.0))
    with pytest.raises(DrafterError, match="not open"):
        drafter.propose([Query("other", 2, 4)])
    with pytest.raises(DrafterError, match="2 committed tokens here, 3 there"):
        drafter.propose([Query("r", 3, 4)])
    with pytest.raises(DrafterError, match="2 committed tokens here, 1 there"):
        drafter.observe([commit_of("r", 1, [1])])
    with pytest.raises(DrafterError, match="not open"):
        drafter.observe([commit_of("other", 2, [1])])
    with pytest.raises(DrafterError, match="without a token"):
        drafter.open(request("empty", [], 0, 0.0))
    drafter.close("r")
    drafter.close("r")
    with pytest.raises(DrafterError, match="not open"):
        drafter.propose([Query("r", 2, 4)])


@every_drafter
def test_no_queries(make: Callable[[], Drafter]) -> None:
    assert make().propose([]) == []
