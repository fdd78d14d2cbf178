"""The client of replicas over a handle that only looks like Ray Serve's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftline import AsyncEngine, EngineConfig, SamplingParams
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.api.engine_client import EngineClient, LocalEngineClient
from draftline.deploy.ray_serve.resume import ResumeLimits, with_heartbeats

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=4, ignore_eos=True)
LIMITS = ResumeLimits(max_tries=3, timeout_s=30.0)


class NoCounts:
    """Nobody counts."""

    def record_resumed(self, cause: str) -> None: ...

    def record_lost(self, cause: str) -> None: ...


class Call:
    """A streaming call: its items, and whether it was cancelled."""

    def __init__(self, items: AsyncGenerator[Any, None]) -> None:
        self._items = items
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._items

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """What a replica does with a stream (`EngineReplica.stream`), in this process.

    dies_after  batches of each call after which its replica dies; further calls have no end
    """

    def __init__(self, engine: AsyncEngine, dies_after: tuple[int, ...] = ()) -> None:
        self._engine = engine
        self._dies_after = list(dies_after)
        self.seeds: list[int | None] = []
        self.calls: list[Call] = []
        self.batches: list[int] = []
        self.call_ids: list[str] = []

    def options(self, *, stream: bool) -> Handle:
        return self

    @property
    def stream(self) -> Handle:
        return self

    def remote(self, prompt: Any, params: Any, options: Any, request_id: str, _key: str) -> Call:
        from ray.serve.context import _get_serve_request_context

        self.call_ids.append(_get_serve_request_context()._internal_request_id)
        self.seeds.append(params.seed)
        batches = self._engine.stream_batches(
            prompt, params, options, request_id=request_id, with_text=False
        )
        most = self._dies_after.pop(0) if self._dies_after else None
        self.calls.append(Call(with_heartbeats(self._noting(batches, most), 0.01)))
        return self.calls[-1]

    async def _noting(self, batches: Any, most: int | None) -> AsyncGenerator[Any, None]:
        from ray.exceptions import ActorDiedError

        async with aclosing(batches):
            async for batch in batches:
                if most is not None and most <= 0:
                    raise ActorDiedError
                most = None if most is None else most - 1
                self.batches.append(len(batch))
                yield batch


@pytest.fixture(scope="module")
def local(checkpoint: Path) -> Iterator[LocalEngineClient]:
    config = EngineConfig(model=str(checkpoint), kv_cache_tokens=1024, multi_step_ms=0)
    local = LocalEngineClient(AsyncEngine(config))
    asyncio.run(local.start())
    yield local
    asyncio.run(local.close())


async def client_of(handle: Handle) -> EngineClient:
    from draftline.deploy.ray_serve.engine_client import RayEngineClient

    config = handle._engine.config
    client = RayEngineClient(handle, config, 30.0, NoCounts(), LIMITS)  # pyright: ignore[reportArgumentType]
    await client.start()
    return client


@pytest.mark.filterwarnings("ignore")  # Ray's own, when it is imported
@pytest.mark.parametrize("dies_after", [(), (0,), (1,), (3, 4, 0)])
@pytest.mark.parametrize("stop", [(), ("a", "zz")])
async def test_texts_are_those_of_an_engine_in_this_process(
    local: LocalEngineClient, stop: tuple[str, ...], dies_after: tuple[int, ...]
) -> None:
    handle = Handle(local._engine, dies_after)
    client = await client_of(handle)
    # The first "a" does not end it.
    params = replace(PARAMS, stop=stop, min_tokens=10 if stop else 0)
    expected = await _answer(local, params)
    assert await _answer(client, params) == expected
    assert sum(handle.batches) >= len(handle.batches) > 0
    assert len(handle.calls) == 1 + len(dies_after)
    assert all(call.is_cancelled for call in handle.calls)


@pytest.mark.filterwarnings("ignore")  # Ray's own, when it is imported
async def test_a_request_without_a_seed_keeps_the_one_that_it_began_with(
    local: LocalEngineClient,
) -> None:
    handle = Handle(local._engine, (2,))
    client = await client_of(handle)
    answer = await _answer(client, replace(PARAMS, seed=None))
    first, second = handle.seeds
    assert first == second is not None
    assert answer == await _answer(local, replace(PARAMS, seed=first))


@pytest.mark.filterwarnings("ignore")  # Ray's own, when it is imported
async def test_choices_of_one_http_request_share_no_call(local: LocalEngineClient) -> None:
    """Ray's router would let one of two calls of the same id wait for ever."""
    from ray.serve.context import _get_serve_request_context

    handle = Handle(local._engine, (2,))
    client = await client_of(handle)
    own = _get_serve_request_context()._internal_request_id
    await asyncio.gather(*(_answer(client, PARAMS, name) for name in "ab"))
    assert len({own, *handle.call_ids}) == 4, "two choices, one of which was resumed"
    assert _get_serve_request_context()._internal_request_id == own


@pytest.mark.filterwarnings("ignore")  # Ray's own, when it is imported
@pytest.mark.parametrize(("dies_after", "count"), [((), 0), ((0,), 1), ((3, 0, 0), 1), ((1, 1), 2)])
async def test_a_line_tells_of_each_request_that_goes_on(
    local: LocalEngineClient,
    caplog: pytest.LogCaptureFixture,
    dies_after: tuple[int, ...],
    count: int,
) -> None:
    """One line, however many replicas were tried in between."""
    client = await client_of(Handle(local._engine, dies_after))
    await _answer(client, PARAMS, "cmpl-7")
    lines = [message for message in caplog.messages if "request_resumed" in message]
    assert lines == ["event=request_resumed request_id=cmpl-7 cause=replica_died"] * count


async def _answer(
    engine_client: EngineClient, params: SamplingParams, request_id: str = "a"
) -> tuple[Any, ...]:
    stream = engine_client.stream([1, 2, 3], params, RequestOptions(), request_id=request_id)
    deltas = [delta async for delta in stream]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, "".join(d.text for d in deltas), deltas[-1].finish_reason, deltas[-1].stop_reason
