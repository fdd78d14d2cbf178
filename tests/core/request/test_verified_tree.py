"""The trees that requests which are explained get to see."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from draftline.core.proposals import Proposal
from draftline.core.request.output import (
    MAX_SHOWN_NODES,
    TARGET_SOURCE,
    Delta,
    StepTiming,
    VerifiedTree,
)
from draftline.core.tree.merge import merge
from hypothesis import given
from hypothesis import strategies as st
from support.fakes.fake_bench import Bench
from support.fakes.fake_target import plain_answer


def checked_path(tree: VerifiedTree) -> list[int]:
    """The tokens of the path, which must go down from the root."""
    above = -1
    for node in tree.path:
        assert tree.parents[node] == above
        above = node
    return [tree.token_ids[node] for node in tree.path]


@pytest.mark.parametrize("multi_step_s", [0.0, 3.0])
@pytest.mark.parametrize("streaming", ["off", "auto"])
async def test_a_path_is_what_its_step_commits(streaming: str, multi_step_s: float) -> None:
    bench = Bench(seed=3, num_groups=5, pipelined_trees=streaming, multi_step_s=multi_step_s)  # pyright: ignore[reportArgumentType]
    bench.add("a", [1, 2, 3], 60, explain=True, pipelined_trees="on")
    bench.add("bb", [1, 2, 3], 60, pipelined_trees="off")
    await bench.run()
    assert bench.tokens("a") == plain_answer([1, 2, 3], 60, 1, 7)
    first, *deltas = [delta for delta in bench.heard["a"] if isinstance(delta, Delta)]
    # The first token is the prompt's.
    assert first.trees == ()
    text = [1, 2, 3, *first.token_ids]
    drafted = 0
    for delta in deltas:
        (tree,) = delta.trees
        assert tree.root_id == text[-1]
        path = checked_path(tree)
        assert list(delta.token_ids[: len(path)]) == path
        sources = [source for source in delta.sources if source != TARGET_SOURCE]
        assert [tree.sources[node] for node in tree.path] == sources
        text += delta.token_ids
        drafted += len(tree.token_ids)
    last = deltas[-1].metrics
    assert last is not None
    assert 0 < drafted == last.num_draft_tokens
    assert not any(isinstance(d, Delta) and d.trees for d in bench.heard["bb"])


async def test_a_steps_parts_are_in_order() -> None:
    ticks = itertools.count()
    bench = Bench(seed=3, clock=lambda: float(next(ticks)), is_adaptive=False)
    bench.add("a", [1, 2, 3], 20, explain=True)
    await bench.run()
    steps = [tree.timing for d in bench.heard["a"] if isinstance(d, Delta) for tree in d.trees]
    assert steps
    for step, after in itertools.pairwise(steps):
        assert step.drafted_at < step.drafted_at + step.draft_s
        assert step.drafted_at + step.draft_s < step.finished_at < step.committed_at
        assert step.finished_at - step.verify_s > step.drafted_at
        assert step.committed_at < after.finished_at
    assert {name for step in steps for name in step.asked} == {"first", "second"}


async def test_plain_decoding_has_trees_without_nodes() -> None:
    bench = Bench(seed=3)
    bench.add("a", [1, 2, 3], 6, speculative=False, explain=True)
    await bench.run()
    trees = [tree for d in bench.heard["a"] if isinstance(d, Delta) for tree in d.trees]
    assert trees
    assert all(tree.token_ids == tree.path == () for tree in trees)


@given(st.integers(1, 3 * MAX_SHOWN_NODES), st.data())
def test_a_large_tree_is_cut_but_for_its_path(size: int, data: st.DataObject) -> None:
    ids = np.arange(size, dtype=np.int32)
    chain = Proposal("any", ids, ids - 1, np.zeros(size, dtype=np.float32))
    tree = merge([chain], size, size)
    path = list(range(data.draw(st.integers(0, size))))
    shown = VerifiedTree.of(tree, 5, path, StepTiming((), 0.0, 0.0, 0.0, 0.0, 0.0))
    assert checked_path(shown) == tree.tokens[path].tolist()
    assert len(shown.token_ids) == max(min(size, MAX_SHOWN_NODES), len(path))
    assert len(shown.token_ids) + shown.num_left_out == size
    assert all(parent < place for place, parent in enumerate(shown.parents))
