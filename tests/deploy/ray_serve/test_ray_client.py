"""The client of replicas over a handle that only looks like Ray Serve's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from draftline import AsyncEngine, EngineConfig, SamplingParams
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.api.engine_client import EngineClient, LocalEngineClient
from draftline.deploy.ray_serve.heartbeat import with_heartbeats

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=4, ignore_eos=True)


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
    """What a replica does with a stream (`EngineReplica.stream`), in this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.calls: list[Call] = []
        self.batches: list[int] = []

    def options(self, *, stream: bool) -> Handle:
        return self

    @property
    def stream(self) -> Handle:
        return self

    def remote(self, prompt: Any, params: Any, options: Any, request_id: str) -> Call:
        batches = self._engine.stream_batches(
            prompt, params, options, request_id=request_id, with_text=False
        )
        self.calls.append(Call(with_heartbeats(self._noting(batches), 0.01)))
        return self.calls[-1]

    async def _noting(self, batches: Any) -> AsyncGenerator[Any, None]:
        async for batch in batches:
            self.batches.append(len(batch))
            yield batch


@pytest.mark.filterwarnings("ignore")  # Ray's own, when it is imported
@pytest.mark.parametrize("stop", [(), ("a", "zz")])
async def test_texts_are_those_of_an_engine_in_this_process(
    checkpoint: Path, stop: tuple[str, ...]
) -> None:
    from draftline.deploy.ray_serve.engine_client import RayEngineClient

    config = EngineConfig(model=str(checkpoint), kv_cache_tokens=1024)
    local = LocalEngineClient(AsyncEngine(config))
    await local.start()
    try:
        handle = Handle(local._engine)
        client = RayEngineClient(handle, config, 30.0)  # pyright: ignore[reportArgumentType]
        await client.start()
        params = SamplingParams(**{**_fields(PARAMS), "stop": stop})
        expected = await _answer(local, params)
        assert await _answer(client, params) == expected
        assert sum(handle.batches) >= len(handle.batches) > 0
        assert handle.calls[0].is_cancelled
    finally:
        await local.close()


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {"max_tokens": params.max_tokens, "temperature": params.temperature,
            "seed": params.seed, "ignore_eos": params.ignore_eos}  # fmt: skip


async def _answer(engine_client: EngineClient, params: SamplingParams) -> tuple[Any, ...]:
    stream = engine_client.stream([1, 2, 3], params, RequestOptions(), request_id="a")
    deltas = [delta async for delta in stream]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, "".join(d.text for d in deltas), deltas[-1].finish_reason, deltas[-1].stop_reason
