"""Clients that leave in the middle free what they held, and disturb nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from draftline import AsyncEngine, DrafterConfig, EngineConfig, SamplingParams
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts

PROMPTS = [prompt.text for prompt in held_out_prompts(3)]
PARAMS = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model="demo", drafters=[DrafterConfig(kind="spectra", pool=False)])
    engine = AsyncEngine(config)
    await engine.start()
    yield engine
    await engine.close()


async def wait_until_idle(engine: AsyncEngine) -> None:
    deadline = time.monotonic() + 20
    while engine.stats().num_running or engine.stats().num_waiting or engine.stats().kv_usage:
        assert time.monotonic() < deadline, "a request that nobody hears runs on"
        await asyncio.sleep(0.01)


async def test_a_stream_that_is_closed_ends_its_request_only(engine: AsyncEngine) -> None:
    plain = await engine.generate(PROMPTS[1], PARAMS, RequestOptions(speculative=False))
    stays = asyncio.create_task(engine.generate(PROMPTS[1], PARAMS))
    leaves = engine.stream(PROMPTS[0], PARAMS)
    for _ in range(3):
        await anext(leaves)
    await leaves.aclose()
    assert (await stays).token_ids == plain.token_ids
    await wait_until_idle(engine)


async def test_whoever_leaves_at_once_leaves_nothing_behind(engine: AsyncEngine) -> None:
    for delay in (0.0, 0.0005, 0.002, 0.01):
        task = asyncio.create_task(engine.generate(PROMPTS[0], PARAMS))
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await wait_until_idle(engine)
