from __future__ import annotations

from dataclasses import replace

import numpy as np
from draftline.core.proposals import Proposal, chain_proposal
from draftline.core.tree.merge import reroot
from hypothesis import given
from hypothesis import strategies as st

VOCAB_SIZE = 3


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    count = draw(st.integers(0, 12))
    tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=count, max_size=count))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    log_probs = -np.arange(count, dtype=np.float32)
    return Proposal(
        "s", np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32), log_probs
    )


def paths(proposal: Proposal) -> list[tuple[tuple[int, ...], float]]:
    """Each node as its path of tokens from the root, with its log-probability, in node order."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return list(zip(found, proposal.log_probs.tolist(), strict=True))


@given(proposals(), st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4))
def test_keeps_exactly_what_continues_the_new_text(proposal: Proposal, committed: list[int]):
    rerooted = reroot(proposal, np.array(committed, dtype=np.int32))
    length = len(committed)
    expected = [
        (path[length:], log_prob)
        for path, log_prob in paths(proposal)
        if len(path) > length and list(path[:length]) == committed
    ]
    if committed and not expected:
        assert rerooted is None
        return
    assert rerooted is not None
    rerooted.check(VOCAB_SIZE)
    assert paths(rerooted) == expected


def test_by_hand():
    # 7 -> (8 -> 9, 5), 4
    tokens = np.array([7, 8, 4, 9, 5], dtype=np.int32)
    parents = np.array([-1, 0, -1, 1, 0], dtype=np.int32)
    proposal = Proposal("s", tokens, parents, np.zeros(5, dtype=np.float32))
    rerooted = reroot(proposal, np.array([7], dtype=np.int32))
    assert rerooted is not None
    assert rerooted.tokens.tolist() == [8, 9, 5]
    assert rerooted.parents.tolist() == [-1, 0, -1]
    assert reroot(proposal, np.array([7, 8, 9], dtype=np.int32)) is None


def test_a_wish_for_top_next_tokens_outlives_root_and_nodes():
    chain = chain_proposal("s", np.array([1, 2], dtype=np.int32))
    asking = replace(chain, num_top_next_tokens=3)
    for committed, left in (([1], [2]), ([1, 2], []), ([5], [])):
        rerooted = reroot(asking, np.array(committed, dtype=np.int32))
        assert rerooted is not None
        assert rerooted.tokens.tolist() == left
        assert rerooted.num_top_next_tokens == 3


def test_a_probe_ends_with_its_root():
    chain = chain_proposal("s", np.array([1, 2], dtype=np.int32))
    assert reroot(chain, np.empty(0, dtype=np.int32)) is chain
    rerooted = reroot(chain, np.array([1], dtype=np.int32))
    assert rerooted is not None
    assert rerooted.probe is None
