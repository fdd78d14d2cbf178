"""Suffix decoding against hand-worked texts and against a look at every occurrence."""

import heapq
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from draftline.core.errors import ConfigError
from draftline.core.proposals import Commit, DraftRequest, Proposal, Query
from draftline.drafters.suffix.drafter import SuffixDrafter, SuffixOptions
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.occurrences import Row, ends_of, following, rows_of

HALF = Fraction(1, 2)


def suffix_drafter(**options: Any) -> SuffixDrafter:
    return SuffixDrafter(options=SuffixOptions(**options))


def open_in(
    drafter: SuffixDrafter, text: list[int], prompt_len: int | None = None, **request: Any
) -> None:
    tokens = np.array(text, dtype=np.int32)
    length = len(text) if prompt_len is None else prompt_len
    fields = {"request_id": "r", "temperature": 0.0, "seed": 0} | request
    drafter.open(DraftRequest(token_ids=tokens, prompt_len=length, **fields))


def end_answer(drafter: SuffixDrafter, answer: list[int], namespace: str = "shared") -> None:
    """A request that answered so, after a prompt of one token."""
    open_in(drafter, [99, *answer], 1, request_id="ended", namespace=namespace)
    drafter.close("ended")


def propose(drafter: SuffixDrafter, text: list[int], max_nodes: int = 50) -> Proposal:
    [proposal] = drafter.propose([Query("r", len(text), max_nodes)])
    return proposal


def after(text: list[int], max_nodes: int = 50, **options: Any) -> list[Row]:
    drafter = suffix_drafter(**options)
    open_in(drafter, text)
    return rows_of(propose(drafter, text, max_nodes))


def test_a_path_follows_the_most_frequent_tokens() -> None:
    # 1 2 stands four times, the last at the end: 3 follows twice, 4 once. After 1 2 3: 9 and 1.
    text = [1, 2, 3, 9, 1, 2, 3, 1, 2, 4, 1, 2]
    assert after(text, tree=False, max_match_len=2, min_token_prob=0.0) == [
        (3, -1, HALF),
        (1, 0, HALF),
    ]
    # Then every token has one successor, until the text ends.
    rows = after(text, tree=False, max_match_len=2, max_spec_offset=9.0)
    assert [row[0] for row in rows] == [3, 1, 2, 4, 1, 2]


def test_a_draft_ends_where_it_becomes_improbable() -> None:
    text = [1, 2, 3, 9, 1, 2, 3, 1, 2, 4, 1, 2]
    for least, length in ((0.51, 0), (0.5, 1), (0.25, 2)):
        assert len(after(text, tree=False, max_match_len=2, min_token_prob=least)) == length


def test_a_tree_holds_the_nodes_of_highest_path_probability() -> None:
    # 1 stands 5 times, once at the end: 2 follows twice, 3 and 4 once each.
    text = [1, 2, 7, 1, 2, 7, 1, 3, 8, 1, 4, 1]
    rows = after(text, max_match_len=1, max_spec_factor=5.0, min_token_prob=0.0)
    two, one = Fraction(2, 5), Fraction(1, 5)
    # All of 2 7 1 comes before the rest; of 4 and 3, which are as probable, the later one.
    assert rows[:4] == [(2, -1, two), (7, 0, 1), (1, 1, 1), (4, -1, one)]
    assert after(text, 2, max_match_len=1, max_spec_factor=5.0) == rows[:2]


def test_a_longer_suffix_may_be_continued_further() -> None:
    text = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7]
    assert [row[0] for row in after(text, tree=False)] == [8, 9, 10]
    assert [row[0] for row in after(text, tree=False, max_spec_factor=1.5)] == [8, 9, 10, 11]
    assert [row[0] for row in after(text, tree=False, max_spec_offset=-2.0)] == [8]
    assert after(text, num_tokens=1) == [(8, -1, HALF)]
    assert after(text, 0) == []
    assert after([1, 2, 3]) == []


def test_earlier_answers_are_used_where_they_score_higher() -> None:
    drafter = suffix_drafter(tree=False)
    end_answer(drafter, [1, 2, 3, 4, 5])
    end_answer(drafter, [0, 2, 3, 4, 5])
    open_in(drafter, [1, 2, 7, 8, 1, 2])
    # Here 7 follows in one of two places, there 3 always does.
    assert rows_of(propose(drafter, [1, 2, 7, 8, 1, 2])) == [(3, -1, 1), (4, 0, 1)]
    drafter.close("r")
    # Equal scores: the own text wins.
    alone = suffix_drafter(tree=False, answer_tokens=0)
    end_answer(alone, [2, 3, 4, 5])
    open_in(alone, [1, 2, 7, 8, 1, 2])
    assert rows_of(propose(alone, [1, 2, 7, 8, 1, 2])) == [(7, -1, HALF), (8, 0, 1)]


@pytest.mark.parametrize("length", [7, 8, 9, 31, 32, 33, 60])
def test_a_long_match_is_told_from_a_shorter_one(length: int) -> None:
    """Two answers say the same after another token, and go on differently."""
    same = list(range(10, 10 + length))
    drafter = suffix_drafter()
    end_answer(drafter, [1, *same, 2, 3])
    end_answer(drafter, [4, *same, 5, 6])
    for first, expected in ((1, [2, 3]), (4, [5, 6])):
        text = [9, first, *same]
        open_in(drafter, text)
        assert [row[0] for row in rows_of(propose(drafter, text))] == expected
    open_in(drafter, same)
    assert rows_of(propose(drafter, same, 2)) == [(5, -1, HALF), (6, 0, 1)]


def test_the_own_text_wins_where_scores_are_equal() -> None:
    drafter = suffix_drafter()
    end_answer(drafter, [1, 9, 1, 8])
    text = [1, 7, 1]
    open_in(drafter, text)
    assert rows_of(propose(drafter, text)) == [(7, -1, HALF)]


def test_prompts_are_no_answers() -> None:
    drafter = suffix_drafter()
    open_in(drafter, [1, 2, 3, 4, 5], 3, request_id="ended")
    drafter.observe([Commit("ended", 5, np.array([6], dtype=np.int32))])
    drafter.close("ended")
    for text, expected in (([0, 2], []), ([0, 4], [5]), ([0, 4, 5], [6])):
        open_in(drafter, text)
        assert [row[0] for row in rows_of(propose(drafter, text))] == expected


def test_answers_of_another_namespace_are_never_read() -> None:
    drafter = suffix_drafter()
    end_answer(drafter, [1, 2, 3], "red")
    end_answer(drafter, [1, 2, 4], "shared")
    for namespace, expected in (("red", [3]), ("shared", [4]), ("blue", [])):
        open_in(drafter, [9, 2], namespace=namespace)
        assert [row[0] for row in rows_of(propose(drafter, [9, 2]))] == expected


def test_answers_of_another_cache_salt_are_never_read() -> None:
    drafter = suffix_drafter()
    open_in(drafter, [99, 1, 2, 3], 1, request_id="ended", cache_salt="red")
    drafter.close("ended")
    for salt, expected in (("red", [3]), ("", [])):
        open_in(drafter, [9, 2], cache_salt=salt)
        assert [row[0] for row in rows_of(propose(drafter, [9, 2]))] == expected


def test_answers_that_are_not_to_be_stored_are_never_read() -> None:
    drafter = suffix_drafter()
    open_in(drafter, [99, 1, 2, 3], 1, request_id="ended", store=False)
    drafter.close("ended")
    open_in(drafter, [9, 2])
    assert rows_of(propose(drafter, [9, 2])) == []


def test_the_oldest_answers_and_namespaces_are_forgotten() -> None:
    drafter = suffix_drafter(answer_tokens=8, max_namespaces=2)
    for index in range(40):
        end_answer(drafter, [index, index + 1, index + 2], f"n{index % 3}")
        drafter.check_integrity()
    # The last two: 38 39 40 of n2, and 39 40 41 of n0, for which n1's were given up.
    for namespace, text, expected in (
        ("n2", [38], [39]),
        ("n0", [39], [40]),
        ("n0", [3], []),
        ("n1", [37], []),
    ):
        open_in(drafter, text, namespace=namespace)
        assert [row[0] for row in rows_of(propose(drafter, text))] == expected


def test_a_request_that_is_opened_again_keeps_its_answer() -> None:
    """As after a preemption: its counts are replaced, and the answer is learned once."""
    text = [1, 2, 3, 4, 1, 2]
    drafter = suffix_drafter(min_token_prob=0.0)
    open_in(drafter, text[:4], 1)
    open_in(drafter, text, 1)
    drafter.observe([Commit("r", 6, np.array([8], dtype=np.int32))])
    drafter.close("r")
    open_in(drafter, [9, 2])
    # In 2 3 4 1 2 8, the token 2 is followed by 3 once and by 8 once.
    assert rows_of(propose(drafter, [9, 2], 1)) == [(8, -1, HALF)]


def test_memory_is_reported_and_bounded() -> None:
    text = np.random.default_rng(1).integers(0, 50, size=3000).tolist()
    drafter = suffix_drafter(window=256, answer_tokens=256)
    assert drafter.memory_bytes == 0
    open_in(drafter, text, 0)
    own = drafter.memory_bytes
    assert 0 < own < 100_000
    drafter.close("r")
    assert 0 < drafter.memory_bytes < 100_000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_match_len", 0),
        ("num_tokens", True),
        ("max_spec_factor", -1.0),
        ("max_spec_factor", math.inf),
        ("max_spec_offset", "1"),
        ("min_token_prob", 1.5),
        ("tree", 1),
        ("window", 1),
        ("answer_tokens", -1),
        ("answer_tokens", 1),
        ("max_namespaces", 0),
    ],
)
def test_wrong_options_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SuffixOptions(**{field: value})
    assert caught.value.field == field


Draft = tuple[float, list[Row]]


def reference_draft(
    texts: list[list[int]], string: list[int], room: int, options: SuffixOptions
) -> Draft:
    """Score and nodes below one string, every count by a look at all texts."""
    nodes: list[Row] = []
    score = 0.0
    frontier: list[Any] = []

    def offer(path: list[int], path_prob: float, parent: int) -> None:
        total = len(ends_of(texts, path))
        known = following(texts, path)
        for one in known if options.tree else known[:1]:
            prob = path_prob * (one.count / total)
            if prob >= options.min_token_prob:
                share = Fraction(one.count, total)
                entry = (-prob, -one.last_end, parent, one.token, share, [*path, one.token])
                heapq.heappush(frontier, entry)

    offer(string, 1.0, -1)
    while frontier and len(nodes) < room:
        cost, _, parent, token, share, path = heapq.heappop(frontier)
        nodes.append((token, parent, share))
        score -= cost
        offer(path, -cost, len(nodes) - 1)
    return score, nodes


def reference(
    texts: list[list[int]], context: list[int], max_nodes: int, options: SuffixOptions
) -> Draft:
    """The definition: suffixes of growing length, as long as they occur."""
    best: Draft = (0.0, [])
    for length in range(1, min(len(context), options.max_match_len) + 1):
        string = context[-length:]
        if not ends_of(texts, string):
            break
        limit = math.floor(options.max_spec_factor * length + options.max_spec_offset + 1e-6)
        room = min(options.num_tokens, max_nodes, limit)
        draft = reference_draft(texts, string, room, options)
        if draft[0] >= best[0]:
            best = draft
    return best


chosen_options = st.builds(
    SuffixOptions,
    max_match_len=st.integers(1, 6),
    num_tokens=st.integers(1, 6),
    max_spec_factor=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    max_spec_offset=st.sampled_from([-1.0, 0.0, 1.5]),
    min_token_prob=st.sampled_from([0.0, 0.1, 0.4]),
    tree=st.booleans(),
)
texts = st.lists(st.integers(0, 2), min_size=1, max_size=16)


@given(st.lists(texts, max_size=3), texts, st.integers(0, 6), chosen_options)
def test_equals_a_look_at_every_occurrence(
    answers: list[list[int]], text: list[int], max_nodes: int, options: SuffixOptions
) -> None:
    drafter = SuffixDrafter(options=options)
    for answer in answers:
        end_answer(drafter, answer)
    open_in(drafter, text)
    own = reference([text], text, max_nodes, options)
    earlier = reference(answers, text, max_nodes, options)
    expected = own if own[0] >= earlier[0] else earlier
    assert rows_of(propose(drafter, text, max_nodes)) == expected[1]
    drafter.check_integrity()


@given(
    st.lists(texts, min_size=1, max_size=4),
    st.lists(st.lists(st.tuples(st.integers(0, 3), texts), max_size=6), max_size=4),
    st.sampled_from([2, 9, 64]),
)
def test_several_requests_in_one_call_are_drafted_for_as_each_alone(
    known: list[list[int]], messages: list[list[tuple[int, list[int]]]], window: int
) -> None:
    """Whatever their texts were committed in: some twice in a message, some beyond a window."""
    drafter = suffix_drafter(window=window, max_match_len=6)
    for index, text in enumerate(known):
        open_in(drafter, text, request_id=str(index), namespace=f"n{index % 2}")
    for message in messages:
        commits = []
        for index, tokens in message:
            if index < len(known):
                base, added = len(known[index]), np.array(tokens, dtype=np.int32)
                commits.append(Commit(str(index), base, added))
                known[index] = known[index] + tokens
        drafter.observe(commits)
        queries = [Query(str(index), len(text), index + 3) for index, text in enumerate(known)]
        for query, text, found in zip(queries, known, drafter.propose(queries), strict=True):
            alone = suffix_drafter(window=window, max_match_len=6)
            open_in(alone, text)
            assert rows_of(found) == rows_of(propose(alone, text, query.max_nodes))
    drafter.check_integrity()
