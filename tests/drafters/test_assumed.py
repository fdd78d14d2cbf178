"""What every drafter promises behind a path that the target has not confirmed."""

from collections.abc import Callable
from typing import Any

import pytest
from draftline.core.interfaces import Drafter
from draftline.core.proposals import Commit, Proposal, Query
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.small_drafters import DRAFTERS, VOCAB, commit_of, request, same

# They learn from text, and what a small window or dictionary keeps depends on all of it.
FORGETFUL = {
    "prompt_lookup, short window", "spectra, tiny dictionaries", "anpd, short window",
    "suffix, paths, short window", "lookahead, tiny",
}  # fmt: skip
# They keep n-grams of text: what was assumed is a part of some where it is committed.
N_GRAMS = ["prompt_lookup", "spectra", "anpd", "suffix"]
# Tokens of the longest n-gram that one of those keeps, and one of the text's end may begin.
LONGEST = 8

every_drafter = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS.keys())
texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
paths = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
temperatures = st.sampled_from([0.0, 0.8])


def ask(drafter: Drafter, text: list[int], path: list[int] | None = None) -> Proposal:
    assumed = None if path is None else tuple(path)
    [proposal] = drafter.propose([Query("r", len(text), 9, assumed)])
    return proposal


def taught(make: Callable[[], Drafter]) -> Drafter:
    """One that has heard answers of the target's, where it asks for them."""
    drafter = make()
    text = [0, 1, 2, 3, 4, 5]
    drafter.open(request("teaching", text, 6, 0.0))
    for token in (0, 3, 1):
        [proposal] = drafter.propose([Query("teaching", len(text), 9)])
        drafter.observe([commit_of("teaching", len(text), [token], proposal)])
        text.append(token)
    return drafter


@pytest.mark.parametrize("name", sorted(DRAFTERS.keys() - FORGETFUL))
@given(text=texts, path=paths, temperature=temperatures)
def test_a_path_is_gone_on_from_as_from_text(
    name: str, text: list[int], path: list[int], temperature: float
) -> None:
    """As where it is committed, but for what an n-gram drafter then learns of it."""
    behind, whole = taught(DRAFTERS[name]), taught(DRAFTERS[name])
    behind.open(request("r", text, len(text), temperature))
    whole.open(request("r", text + path, len(text), temperature))
    one, other = ask(behind, text, path), ask(whole, text + path)
    if name in N_GRAMS:
        begun = {*text[-LONGEST + 1 :], *path[:-1]}
        said = {path[-1], *one.tokens.tolist(), *other.tokens.tolist()}
        assert same(one, other) or begun & said
    else:
        assert same(one, other)
    assert one.num_top_next_tokens == other.num_top_next_tokens
    assert one.probe is None


@pytest.mark.parametrize("name", N_GRAMS)
def test_n_grams_of_the_text_go_on_behind_a_path(name: str) -> None:
    text = [1, 2, 3, 4, 5, 0, 0, 0]
    drafter = DRAFTERS[name]()
    drafter.open(request("r", text, len(text), 0.0))
    assert ask(drafter, text, [1, 2]).tokens.tolist()[:2] == [3, 4]
    # One that stands on both sides of the path's beginning.
    text[-1] = 2
    drafter.open(request("r", text, len(text), 0.0))
    assert ask(drafter, text, [3]).tokens.tolist()[:2] == [4, 5]


@every_drafter
@given(text=texts, asked=st.lists(paths, min_size=1, max_size=3), temperature=temperatures)
def test_nothing_is_learned_of_a_path(
    make: Callable[[], Drafter], text: list[int], asked: list[list[int]], temperature: float
) -> None:
    drafter, other = taught(make), taught(make)
    for one in (drafter, other):
        one.open(request("r", text, len(text), temperature))
    before = ask(drafter, text)
    for path in asked:
        said = ask(drafter, text, path)
        said.check(VOCAB)
        assert len(said.tokens) <= 9
        assert same(ask(drafter, text, path), said)
    assert same(ask(drafter, text), before)
    ask(other, text)
    committed = [*asked[0], 2]
    for one in (drafter, other):
        one.observe([commit_of("r", len(text), committed)])
    text = [*text, *committed]
    assert same(ask(drafter, text), ask(other, text))
    # Nor for others.
    for one in (drafter, other):
        one.close("r")
        one.open(request("r", [1, 2, *asked[0]], 2, temperature))
    text = [1, 2, *asked[0]]
    assert same(ask(drafter, text), ask(other, text))


@every_drafter
@given(asked=st.lists(st.tuples(texts, st.none() | paths), min_size=2, max_size=4))
def test_queries_with_and_without_paths_in_one_message(
    make: Callable[[], Drafter], asked: list[tuple[list[int], Any]]
) -> None:
    drafter = make()
    queries = []
    for index, (text, path) in enumerate(asked):
        drafter.open(request(str(index), text, len(text), 0.8 * (index % 2)))
        assumed = None if path is None else tuple(path)
        queries.append(Query(str(index), len(text), 9 - index, assumed))
    together = drafter.propose(queries)
    for query, proposal in zip(queries, together, strict=True):
        [alone] = drafter.propose([query])
        assert same(alone, proposal)
        assert alone.num_top_next_tokens == proposal.num_top_next_tokens
        assert (alone.probe is None) == (proposal.probe is None)


@every_drafter
def test_a_path_of_any_length_is_no_error(make: Callable[[], Drafter]) -> None:
    drafter = make()
    drafter.open(request("r", [1, 2], 2, 0.0))
    for path in ([], [1] * 5000, [2**31 - 1]):
        ask(drafter, [1, 2], path).check(VOCAB)
    drafter.observe([Commit("r", 2, commit_of("r", 2, [3]).tokens)])
    ask(drafter, [1, 2, 3]).check(VOCAB)
