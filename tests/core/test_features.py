"""Features of committed tokens, on their way from the last stage to the drafters."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from support.fakes.fake_bench import Bench


@given(
    seed=st.integers(0, 2**20), num_blocks=st.sampled_from([9, 16, 64]), probes=st.booleans(),
    rows=st.sampled_from([16, 40]), num_groups=st.integers(1, 2),
)  # fmt: skip
def test_drafters_get_those_of_every_committed_token(
    seed: int, num_blocks: int, probes: bool, rows: int, num_groups: int
) -> None:
    """Through trees, probes, chunked prompts, shared prefixes and preemption."""
    bench = Bench(
        num_blocks=num_blocks, rows=rows, seed=seed, probes=probes, features=True,
        is_adaptive=False, num_groups=num_groups,
    )  # fmt: skip
    asyncio.run(bench.run_three(seed))
    assert bench.drafters.feature_rows > 20


def test_nobody_hands_any_out_who_is_not_asked() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], 9)
    asyncio.run(bench.run())
    assert not any(step.heads.feature_requests for step in bench.target.steps)


def test_a_request_without_drafts_has_none() -> None:
    bench = Bench(features=True, is_adaptive=False)
    bench.add("a", [1, 2, 3], 9, speculative=False)
    bench.add("b", [1, 2, 3, 4], 9)
    asyncio.run(bench.run())
    steps = [step for step in bench.target.steps if step.heads.feature_requests]
    assert steps
    assert all(len(step.heads.feature_requests) == 1 for step in steps)


def test_a_step_that_hands_out_features_decodes_one_token_of_each() -> None:
    bench = Bench(features=True, is_adaptive=False, multi_step_s=100.0)
    bench.add("a", [1, 2, 3], 30)
    asyncio.run(bench.run())
    assert all(step.multi_step is None for step in bench.target.steps)
