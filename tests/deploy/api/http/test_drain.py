"""A server that stops refuses new requests and lets those that run end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from draftline import AsyncEngine, EngineConfig, SamplingParams
from draftline.core.errors import EngineClosed
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.api.http.middleware import Drain
from draftline.deploy.settings.settings import ServerConfig
from support.fakes.fake_engine import FakeEngine
from support.servers.served_model import served_model
from support.servers.stopped_streams import NUM_TOKENS, WHOLE, streams_through_sigterm

BODY = {"prompt": "abc", "max_tokens": 6}


async def test_new_requests_are_refused_while_one_runs() -> None:
    engine, drain = FakeEngine(hold=asyncio.Event()), Drain()
    engine_client = LocalEngineClient(engine)  # pyright: ignore[reportArgumentType]
    app = create_app(engine_client, ServerConfig(), "tiny", drain=drain)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        running = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await engine.arrivals.get()
        drain.begin()
        ending = asyncio.create_task(drain.finish(60))
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            refused = await client.post(path, json=BODY)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
            assert "x-request-id" in refused.headers
            assert "shutting down" in refused.json()["error"]["message"]
        health = await client.get("/health")
        assert health.status_code == 503
        assert "shutting down" in health.json()["error"]["message"]
        assert (await client.get("/metrics")).status_code == 200
        assert (drain.num_running, ending.done()) == (1, False)
        assert engine._hold is not None
        engine._hold.set()
        assert (await running).json()["choices"][0]["finish_reason"] == "length"
        assert await ending


async def test_waiting_ends_with_the_time_or_a_second_call() -> None:
    drain = Drain()
    drain.enter()
    drain.begin()
    assert not await drain.finish(0)
    waiting = asyncio.create_task(drain.finish(60))
    await asyncio.sleep(0)
    drain.begin()
    assert not await waiting
    drain.leave()
    assert await drain.finish(0)


async def test_nothing_that_runs_is_nothing_to_wait_for() -> None:
    drain = Drain()
    drain.enter()
    drain.leave()
    drain.begin()
    assert await drain.finish(60)


async def test_a_closed_engine_says_so(checkpoint: Path) -> None:
    engine = AsyncEngine(EngineConfig(model=str(checkpoint), kv_cache_tokens=512))
    await engine.start()
    stream = engine.stream("abc", SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    await anext(stream)
    await engine.close()
    with pytest.raises(EngineClosed, match="was closed"):
        async for _ in stream:
            pass
    with pytest.raises(EngineClosed, match="is closed"):
        await engine.generate("abc")


@pytest.mark.full
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("local", marks=pytest.mark.net),
        pytest.param("ray", marks=(pytest.mark.cluster, pytest.mark.timeout(300))),
    ],
)
def test_streams_end_with_an_error_when_the_time_is_over(checkpoint: Path, backend: str) -> None:
    """tests/deploy/cli/test_cli.py has streams that end whole."""
    arguments = [str(checkpoint), "--served-model-name", "tiny", "--speculative-config", "[]"]
    # Or the answers are over before the signal comes.
    arguments += ["--multi-step-ms", "0", "--backend", backend, "--drain-timeout", "0"]
    with served_model(*arguments) as served:
        heard = streams_through_sigterm(served)
        assert served.process.stdout is not None
        printed, code = served.process.stdout.read(), served.process.wait(60)
    # On a busy machine the first streams may be over when the last one begins.
    cut = [messages for messages in heard if messages != WHOLE[0]]
    assert cut
    for messages in cut:
        assert len(messages) == 1
        assert "the server is shutting down, please retry" in messages[0]
    assert printed.endswith("stopped\n")
    assert "Traceback" not in printed
    assert code == 0
