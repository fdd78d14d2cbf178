"""A batch of proposals is refused where one of them would be, and is the same as each of them."""

from dataclasses import replace

import numpy as np
import pytest
from draftline.core.errors import ProtocolError
from draftline.core.proposals import MAX_PROPOSAL_NODES
from draftline.core.tree.proposal_batch import ProposalBatch
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 5
NODES = st.tuples(
    st.integers(-1, VOCAB),
    st.integers(-2, 3),
    st.sampled_from([0.0, -1.5, 0.5, float("nan"), float("-inf")]),
)


def batch_of(proposals: list[list[tuple[int, int, float]]]) -> ProposalBatch:
    nodes = [node for own in proposals for node in own]
    tokens, parents, log_probs = zip(*nodes, strict=True) if nodes else ((), (), ())
    return ProposalBatch(
        "any",
        np.array(tokens, dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.array(log_probs, dtype=np.float32),
        np.array([len(own) for own in proposals], dtype=np.int64).cumsum(),
    )


def is_refused(part: object) -> bool:
    try:
        part.check(VOCAB)  # type: ignore[attr-defined]
    except ProtocolError:
        return True
    return False


@given(st.lists(st.lists(NODES, max_size=4), max_size=4))
def test_a_batch_is_refused_where_one_of_its_proposals_is(
    proposals: list[list[tuple[int, int, float]]],
) -> None:
    batch = batch_of(proposals)
    assert len(batch) == len(proposals)
    for found, nodes in zip(batch, proposals, strict=True):
        assert (found.source, found.probe) == ("any", None)
        assert found.tokens.tolist() == [token for token, _, _ in nodes]
        assert found.parents.tolist() == [parent for _, parent, _ in nodes]
    assert is_refused(batch) == any(map(is_refused, batch))


@pytest.mark.parametrize("ends", [[4], [2, 1, 3], [-1, 3], [3, 3, 2, 3], [10**12, 3]])
def test_ends_that_do_not_fit_are_refused(ends: list[int]) -> None:
    three = np.zeros(3, dtype=np.int32)
    parents = np.full(3, -1, dtype=np.int32)
    batch = ProposalBatch(
        "any", three, parents, np.zeros(3, dtype=np.float32), np.array(ends, dtype=np.int64)
    )
    with pytest.raises(ProtocolError):
        batch.check(VOCAB)


def test_other_types_and_too_many_nodes_are_refused() -> None:
    wrong = batch_of([[(1, -1, 0.0)]])
    assert is_refused(replace(wrong, tokens=wrong.tokens.astype(np.int64)))
    assert is_refused(replace(wrong, parents=wrong.parents[:0]))
    assert is_refused(batch_of([[(1, -1, 0.0)] * (MAX_PROPOSAL_NODES + 1)]))
    assert not is_refused(batch_of([[(1, -1, 0.0)] * MAX_PROPOSAL_NODES]))
