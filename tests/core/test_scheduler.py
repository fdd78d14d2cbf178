"""Memory that is too small, shared prefixes and priorities change who waits, and no text."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from draftline.core.errors import StageLost
from draftline.core.kv_cache import PrefixKeys
from draftline.core.request.output import Delta, RequestMetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes.fake_bench import Bench
from support.fakes.fake_target import plain_answer

VOCAB = 7
PREFIX = [1, 5, 2, 2, 6, 3, 0, 4, 4, 1, 3, 5, 2]

requests = st.lists(
    st.tuples(
        st.integers(0, len(PREFIX)),
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
        st.integers(1, 24),
        st.booleans(),
        st.integers(-1, 1),
        st.sampled_from(["shared", "tenant"]),
    ),
    min_size=1,
    max_size=10,
)


def metrics(bench: Bench, name: str) -> RequestMetrics:
    last = bench.heard[name][-1]
    assert isinstance(last, Delta)
    assert last.metrics is not None
    return last.metrics


@settings(max_examples=2 * settings().max_examples)
@given(
    requests,
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.integers(13, 30),
    st.sampled_from([2, None]),
    st.data(),
)
def test_text_survives_preemption_and_shared_prefixes(
    found: list[tuple[int, list[int], int, bool, int, str]],
    seed: int,
    groups: int,
    num_blocks: int,
    memory: int | None,
    data: st.DataObject,
) -> None:
    bench = Bench(
        seed=seed, num_groups=groups, num_blocks=num_blocks, probes=True, memory=memory, rows=24
    )
    names = ["r" * (index + 1) for index in range(len(found))]
    cancelled: set[str] = set()

    async def scenario() -> None:
        for name, (shared, rest, max_tokens, speculative, priority, namespace) in zip(
            names, found, strict=True
        ):
            for _ in range(data.draw(st.integers(0, 4))):
                await bench.core.step()
            bench.add(
                name, PREFIX[:shared] + rest, max_tokens, speculative,
                priority=priority, namespace=namespace, tenant=namespace,
            )  # fmt: skip
            bench.pool.check()
            if data.draw(st.integers(0, 9)) == 0:
                cancelled.add(gone := data.draw(st.sampled_from(names)))
                bench.core.cancel(gone)
        await bench.run()

    asyncio.run(scenario())
    bench.check_empty()
    for name, (shared, rest, max_tokens, _, _, _) in zip(names, found, strict=True):
        whole = plain_answer(PREFIX[:shared] + rest, max_tokens, len(name), VOCAB, memory)
        said = bench.tokens(name)
        assert said == whole or (name in cancelled and said == whole[: len(said)])


async def test_a_pool_that_is_too_small_preempts_the_last_and_all_end() -> None:
    bench = Bench(num_blocks=14, max_running=4, share_prefixes=False)
    for name in ("a", "bb", "ccc", "dddd"):
        bench.add(name, [1, 2, 3], 40)
    await bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert metrics(bench, "a").num_preemptions == 0
    for name in ("a", "bb", "ccc", "dddd"):
        assert bench.tokens(name) == plain_answer([1, 2, 3], 40, len(name), VOCAB)
    bench.check_empty()


async def test_drafts_preempt_nobody() -> None:
    bench = Bench(num_blocks=16, max_running=2, nodes=10)
    for name in ("a", "bb"):
        bench.add(name, [1, 2, 3], 20)
    await bench.run()
    assert bench.scheduler.num_preemptions == 0


async def test_a_second_request_reuses_the_blocks_of_the_first() -> None:
    bench = Bench(memory=None)
    bench.add("a", [*PREFIX, 1], 10)
    await bench.run()
    bench.add("bb", [*PREFIX, 2], 10)
    await bench.run()
    assert metrics(bench, "a").cached_tokens == 0
    assert metrics(bench, "bb").cached_tokens == 12
    assert bench.tokens("bb") == plain_answer([*PREFIX, 2], 10, 2, VOCAB, None)


async def test_equal_prompts_that_come_together_are_computed_once() -> None:
    bench = Bench(seed=3, num_blocks=60, rows=8)
    prompt = PREFIX * 3
    for name in ("a", "b", "c"):
        bench.add(name, prompt, 4, False)
    bench.add("other", [*prompt[1:], 1], 4, False)
    await bench.run()
    cached = {name: metrics(bench, name).cached_tokens for name in ("a", "b", "c", "other")}
    whole_blocks = (len(prompt) - 1) // bench.pool.block_size * bench.pool.block_size
    assert cached == {"a": 0, "b": whole_blocks, "c": whole_blocks, "other": 0}


async def test_an_answer_is_reused_by_the_next_turn() -> None:
    bench = Bench(memory=None)
    bench.add("a", PREFIX, 30)
    await bench.run()
    prompt = [*PREFIX, *bench.tokens("a"), 1, 2, 3]
    bench.add("bb", prompt, 10)
    await bench.run()
    # The last step's tokens were never moved to their place.
    assert metrics(bench, "bb").cached_tokens >= len(PREFIX) + 30 - 16
    assert bench.tokens("bb") == plain_answer(prompt, 10, 2, VOCAB, None)


@pytest.mark.parametrize("other", [{"namespace": "tenant"}, {"cache_salt": "x"}])
async def test_tenants_and_salts_share_nothing(other: dict[str, str]) -> None:
    bench = Bench()
    bench.add("a", [*PREFIX, 1], 10)
    await bench.run()
    bench.add("bb", [*PREFIX, 1], 10, **other)
    await bench.run()
    assert metrics(bench, "bb").cached_tokens == 0


async def test_a_lower_priority_goes_first() -> None:
    bench = Bench(max_running=1)
    ended: list[str] = []
    for name, priority in (("a", 0), ("bb", 5), ("ccc", 0), ("dddd", -5)):
        bench.add(name, [1, 2], 3, priority=priority)
    while bench.core.has_work:
        await bench.core.step()
        for name, events in bench.heard.items():
            last = events[-1] if events else None
            if name not in ended and isinstance(last, Delta) and last.finish_reason:
                ended.append(name)
    assert ended == ["dddd", "a", "ccc", "bb"]


async def test_a_new_pipeline_knows_no_prefix() -> None:
    bench = Bench(memory=None)
    bench.add("a", [*PREFIX, 1], 10)
    await bench.run()
    bench.target.lost = True
    bench.add("bb", [*PREFIX, 2], 10)
    with suppress(StageLost):
        await bench.run()
    bench.replace_target()
    await bench.run()
    # The request that the loss found running computes all of its prompt again.
    assert len(bench.target.steps[0].token_ids) == len(PREFIX) + 1
    assert bench.tokens("bb") == plain_answer([*PREFIX, 2], 10, 2, VOCAB, memory=None)


def test_keys_depend_on_all_before_them_and_on_the_salt() -> None:
    keys = PrefixKeys("salt", 4)
    text = list(range(16))
    first = keys.upto(text, 15)
    assert len(first) == 3
    assert keys.upto(text, 16)[:3] == first
    of_array = PrefixKeys("salt", 4).upto(np.array(text, dtype=np.int32), 16)
    assert keys.after(2, text, 16) == of_array[2:]
    other = [9, *text[1:]]
    assert set(PrefixKeys("salt", 4).upto(other, 16)).isdisjoint(keys.upto(text, 16))
    assert set(PrefixKeys("pepper", 4).upto(text, 16)).isdisjoint(keys.upto(text, 16))
