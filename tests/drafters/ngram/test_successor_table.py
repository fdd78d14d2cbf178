"""Token Recycling's table: what it keeps, how it grows, and the trees that are read out of it."""

import numpy as np
import pytest
from draftline.core.arrays import Int32
from draftline.core.errors import DrafterError
from draftline.core.proposals import TopNextTokens
from draftline.drafters.ngram.token_recycling import SuccessorTable, tree_template
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 9
rows = st.lists(
    st.tuples(
        st.integers(0, VOCAB - 1),
        st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=2, unique=True),
    ),
    max_size=12,
)


def heard(*known: tuple[int, list[int]], width: int = 2) -> TopNextTokens:
    tokens = np.array([token for token, _ in known], dtype=np.int32)
    ids = np.array([ids for _, ids in known], dtype=np.int32).reshape(len(known), width)
    return TopNextTokens(tokens, ids)


def drafts(table: SuccessorTable, root: int, num_nodes: int) -> tuple[list[int], list[int]]:
    return table.expand(root, tree_template(num_nodes, 2))


def test_a_tree_is_read_out_of_the_table() -> None:
    """The template's first nodes are 0, 00, 1, 000, 01: as ranks on the way from the root."""
    table = SuccessorTable(2, VOCAB)
    table.learn(heard((1, [2, 3]), (2, [4, 1]), (4, [4, 5])))
    assert drafts(table, 1, 5) == ([2, 4, 3, 4, 1], [-1, 0, -1, 1, 0])


def test_below_what_is_not_known_is_nothing() -> None:
    table = SuccessorTable(2, VOCAB)
    table.learn(heard((1, [3, 2]), (2, [1, 5])))
    # Nodes 0, 1, 10 are known; 00, 000 and 01 are not, since 3 is not. 10 is the seventh.
    assert drafts(table, 1, 7) == ([3, 2, 1], [-1, -1, 1])
    # Of 7 and 8 it has not heard, not even as top next tokens.
    assert drafts(table, 3, 5) == drafts(table, 7, 5) == drafts(table, 8, 5) == ([], [])


def test_the_latest_counts_and_of_one_message_the_last() -> None:
    table = SuccessorTable(2, VOCAB)
    table.learn(heard((1, [2, 3]), (1, [4, 5])))
    assert drafts(table, 1, 3) == ([4, 5], [-1, -1])
    table.learn(heard((1, [6, 7])))
    assert drafts(table, 1, 3) == ([6, 7], [-1, -1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (heard((1, [2, 3, 4]), width=3), "3 top next tokens a token came, 2 were wanted"),
        (heard((VOCAB, [1, 2])), "token 9 is not below max_vocab, 9"),
        (heard((1, [1, 700])), "token 700"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: TopNextTokens, message: str) -> None:
    table = SuccessorTable(2, VOCAB)
    table.learn(heard((1, [2, 3])))
    with pytest.raises(DrafterError, match=message):
        table.learn(wrong)
    assert drafts(table, 1, 1) == ([2], [-1])


def test_nothing_heard_changes_nothing() -> None:
    table = SuccessorTable(2, VOCAB)
    table.learn(heard())
    assert drafts(table, 0, 1) == ([], [])


@given(st.lists(rows, max_size=5), st.integers(0, VOCAB - 1), st.integers(0, 20))
def test_equals_a_walk_through_a_dictionary(
    messages: list[list[tuple[int, list[int]]]], root: int, num_nodes: int
) -> None:
    table = SuccessorTable(2, VOCAB)
    known: dict[int, list[int]] = {}
    for message in messages:
        table.learn(heard(*message))
        known.update(message)
    ways: list[tuple[int, ...]] = [()]
    for parent, rank in tree_template(num_nodes, 2):
        ways.append((*ways[parent], rank))

    def end(way: tuple[int, ...]) -> int | None:
        token: int | None = root
        for rank in way:
            token = known[token][rank] if token in known else None
        return token

    nodes = [way for way in ways[1:] if end(way) is not None]
    tokens, parents = drafts(table, root, num_nodes)
    assert tokens == [end(way) for way in nodes]
    assert parents == [nodes.index(way[:-1]) if way[:-1] else -1 for way in nodes]


def test_it_grows_to_the_ids_that_it_hears_of() -> None:
    table = SuccessorTable(2, 2**20)
    for token in (3, 700, 40_000, 5):
        table.learn(heard((token, [token + 1, token + 2])))
    found: list[Int32] = [table._ids[token] for token in (3, 700, 40_000, 5)]
    assert [row.tolist() for row in found] == [[t + 1, t + 2] for t in (3, 700, 40_000, 5)]
    assert 40_003 < len(table._ids) < 2**18
