"""Drafters that return garbage, fuzzed through the real hub and engine: they only cost speed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.local_drafter import LocalDrafter
from draftline.cluster.drafting.replies import DrafterLimits
from draftline.cluster.links.failures import RetryPolicy
from draftline.core.engine import EngineCore
from draftline.core.proposals import DraftDistributions, Probe, Proposal, Query
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes.fake_bench import Bench
from support.fakes.fake_drafters import VOCAB_SIZE, CountingDrafter, ScriptedDrafter
from support.fakes.fake_target import plain_answer

VOCAB = VOCAB_SIZE
PROMPT = [1, 2, 3]
NUM_TOKENS = 12
# Tried again at once, so that every answer of a run is garbage.
LIMITS = DrafterLimits(
    vocab_size=VOCAB, max_probe_rows=6, retry=RetryPolicy(first_delay_s=0.0, max_delay_s=0.0)
)

dtypes = st.sampled_from([np.int32, np.int64, np.float32, np.float64, np.bool_, object])
numbers = st.one_of(
    st.integers(-3, VOCAB + 3),
    st.sampled_from([-(2**31), 2**31 - 1, 10**6]),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), -0.5, 0.0]),
)


@st.composite
def garbage_arrays(draw: st.DrawFn) -> Any:
    if draw(st.integers(0, 9)) == 0:
        return draw(st.none() | st.text(max_size=2) | st.lists(st.integers(0, 3), max_size=3))
    values = draw(st.lists(numbers, max_size=8)) * draw(st.sampled_from([1, 1, 1, 400]))
    dtype = draw(dtypes)
    with np.errstate(invalid="ignore"):
        array = np.array(values, dtype=np.float64).astype(dtype)
    return array.reshape(-1, 1) if draw(st.integers(0, 7)) == 0 else array


@st.composite
def cyclic_or_valid(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """Arrays of the right shapes and dtypes, whose parents may form cycles or point ahead."""
    size = draw(st.integers(0, 8)) * draw(st.sampled_from([1, 1, 60]))
    ids = st.integers(-1, VOCAB)
    tokens = draw(st.lists(ids, min_size=size, max_size=size))
    parents = draw(st.lists(st.integers(-2, max(size, 1)), min_size=size, max_size=size))
    log_probs = draw(
        st.lists(st.sampled_from([0.0, -1.0, float("nan"), 0.7]), min_size=size, max_size=size)
    )
    return (
        np.array(tokens, dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.array(log_probs, dtype=np.float32),
    )


garbage_probes = st.none() | st.builds(
    Probe,
    garbage_arrays(),
    garbage_arrays(),
    garbage_arrays(),
    garbage_arrays(),
    st.integers(-2, 100) | st.none(),
)
garbage_proposals = st.one_of(
    st.builds(
        lambda arrays, probe, count, distributions: Proposal(
            "garbage", *arrays, probe, count, distributions
        ),
        st.tuples(garbage_arrays(), garbage_arrays(), garbage_arrays()) | cyclic_or_valid(),
        garbage_probes,
        st.integers(-3, 200) | st.none(),
        st.none() | st.builds(DraftDistributions, garbage_arrays(), garbage_arrays()),
    ),
    st.sampled_from([None, 3, "text", (), Query("other", 1, 1)]),
)


async def run(answers: list[Any], seed: int) -> tuple[list[int], DrafterHub]:
    """What a request answers beside a drafter that gives these in turn, and the hub."""
    given = iter(answers * (NUM_TOKENS + 1))
    garbage = ScriptedDrafter(lambda _query: next(given), name="garbage")
    honest = CountingDrafter(name="honest", num_tokens=2)
    hub = DrafterHub([LocalDrafter(garbage), LocalDrafter(honest)], LIMITS)
    await hub.start()
    bench = Bench(vocab=VOCAB)
    bench.core = EngineCore(bench.target, hub, bench.scheduler, bench.policy, bench.clock)
    bench.add("r", PROMPT, NUM_TOKENS, seed=seed)
    await bench.run()
    bench.check_empty()
    await hub.stop()
    return bench.tokens("r"), hub


@settings(deadline=None, max_examples=40)
@given(st.lists(garbage_proposals, min_size=1, max_size=4), st.integers(0, 5))
def test_garbage_changes_no_text_and_harms_no_other_drafter(answers: list[Any], seed: int) -> None:
    tokens, hub = asyncio.run(run(answers, seed))
    assert tokens == plain_answer(PROMPT, NUM_TOKENS, seed, VOCAB)
    garbage, honest = hub.stats()
    assert honest.errors == 0
    assert honest.proposals
    # What is no proposal at all is always counted.
    if not any(isinstance(answer, Proposal) for answer in answers):
        assert garbage.errors
        assert not garbage.proposals


def test_each_kind_of_garbage_is_counted() -> None:
    one = np.zeros(1, dtype=np.int32)
    log_prob = np.zeros(1, dtype=np.float32)
    bad = [
        Proposal("garbage", one, np.zeros(2, dtype=np.int32), log_prob),
        Proposal("garbage", one, one, log_prob),
        Proposal("garbage", one + VOCAB, one - 1, log_prob),
        Proposal("garbage", one, one - 1, log_prob * np.float32("nan")),
        Proposal("garbage", one.astype(np.int64), one - 1, log_prob),
        Proposal("somebody else", one, one - 1, log_prob),
        None,
    ]
    for answer in bad:
        _, hub = asyncio.run(run([answer], seed=0))
        garbage, _ = hub.stats()
        assert garbage.errors > 0, answer
        assert garbage.proposals == 0, answer
