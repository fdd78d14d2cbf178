"""The engine's process and API processes, killed and paused under load: nobody waits for ever."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.servers.processes import api_pids, is_alive, num_connections, send_signal
from support.servers.served_model import ServedModel, served_model

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

# As many as its context holds: an answer should not end before the last one begins.
NUM_TOKENS = 1000
BODY = {
    "model": "demo", "prompt": "def add(left, right):\n", "max_tokens": NUM_TOKENS, "stream": True,
    "temperature": 1.0, "ignore_eos": True, "stream_options": {"include_usage": True},
}  # fmt: skip
SHORT = BODY | {"max_tokens": 4, "stream": False, "stream_options": None}
WAIT_S = 60.0
# How a stream ended.
WHOLE, ERROR_EVENT, CUT_OFF = "whole", "error event", "cut off"


@pytest.fixture(scope="module")
def served() -> Iterator[ServedModel]:
    arguments = ["demo", "--api-processes", "2", "--speculative-config", "[]"]
    with served_model(*arguments, "--max-num-seqs", "32") as served:
        yield served


class Stream:
    """One answer on a connection of its own."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self._client = client
        self._seed = seed
        self.num_events = 0
        self.begun = asyncio.Event()
        self.error: dict[str, Any] = {}
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> str:
        try:
            async with self._client.stream("POST", "/completions", json=BODY | {"seed": self._seed}) as answer:  # noqa: E501  # fmt: skip
                async for line in answer.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        return WHOLE
                    self.num_events += 1
                    self.begun.set()
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        self.error = event["error"]
                        return ERROR_EVENT
        except httpx.HTTPError:
            return CUT_OFF
        return CUT_OFF


@asynccontextmanager
async def streams(served: ServedModel) -> AsyncIterator[list[Stream]]:
    """Streams that have begun, some at each of the API processes."""
    pids, port = api_pids(served.process.pid), port_of(served)
    assert len(pids) == 2
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=served.url, timeout=WAIT_S, limits=limits) as client:
        await both_take_connections(pids, port)
        running: list[Stream] = []
        while len(running) < 4 or not all(num_connections(pid, port) for pid in pids):
            assert len(running) < 24, "one of the processes takes no connections"
            running.append(Stream(client, len(running)))
            await asyncio.wait_for(running[-1].begun.wait(), WAIT_S)
        yield running
        for one in running:
            one.task.cancel()


async def both_take_connections(pids: list[int], port: int) -> None:
    """Wait for those that import their libraries still; leaves no connection open."""
    open_ones = []
    async with asyncio.timeout(WAIT_S):
        while not all(num_connections(pid, port) for pid in pids):
            open_ones.append(await asyncio.open_connection("127.0.0.1", port))
            await asyncio.sleep(0.2)
    for _, writer in open_ones:
        writer.close()
    await until(lambda: not any(num_connections(pid, port) for pid in pids))


def port_of(served: ServedModel) -> int:
    return httpx.URL(served.url).port or 0


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.05)


async def answers(served: ServedModel) -> int:
    """The status of a short request on a new connection."""
    async with httpx.AsyncClient(base_url=served.url, timeout=WAIT_S) as client:
        return (await client.post("/completions", json=SHORT)).status_code


async def num_running(served: ServedModel) -> int:
    async with httpx.AsyncClient(base_url=served.url, timeout=WAIT_S) as client:
        return (await client.get(served.url.replace("/v1", "/load"))).json()["server_load"]


async def ends(running: list[Stream]) -> list[str]:
    return await asyncio.wait_for(asyncio.gather(*(one.task for one in running)), WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_api_process_dies_or_hangs(served: ServedModel, number: int) -> None:
    async with streams(served) as running:
        victim, other = api_pids(served.process.pid)
        num_lost = num_connections(victim, port_of(served))
        send_signal(victim, number)
        found = await ends(running)
        assert (found.count(CUT_OFF), found.count(WHOLE)) == (num_lost, len(running) - num_lost)
    await until(lambda: not is_alive(victim))
    # Nothing of the lost ones is computed on, and there are two again.
    assert await num_running(served) == 0
    await until(lambda: len(api_pids(served.process.pid)) == 2)
    assert other in api_pids(served.process.pid)
    assert await answers(served) == 200


async def test_the_engines_process_is_paused(served: ServedModel) -> None:
    async with streams(served) as running:
        send_signal(served.process.pid, signal.SIGSTOP)
        try:
            assert set(await ends(running)) == {ERROR_EVENT}
            assert {one.error["code"] for one in running} == {503}
            assert await answers(served) == 503
        finally:
            os.kill(served.process.pid, signal.SIGCONT)
    async with asyncio.timeout(WAIT_S):
        while await answers(served) != 200:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.2)
    assert await num_running(served) == 0


@pytest.mark.full
async def test_a_signal_lets_both_processes_end_their_streams(served: ServedModel) -> None:
    with served_model("demo", "--api-processes", "2", "--speculative-config", "[]") as other:
        pids = api_pids(other.process.pid)
        async with streams(other) as running:
            other.process.send_signal(signal.SIGTERM)
            assert set(await ends(running)) == {WHOLE}
        assert other.process.wait(WAIT_S) == 0
        assert other.process.stdout is not None
        printed = other.process.stdout.read()
        assert printed == (
            f"waiting up to 20 s for {len(running)} requests (once more ends them)\nstopped\n"
        )
        await until(lambda: not any(map(is_alive, pids)))


async def test_the_engines_process_is_killed(served: ServedModel) -> None:
    """The last one: it ends the server."""
    pids = api_pids(served.process.pid)
    async with streams(served) as running:
        served.process.kill()
        found = await ends(running)
        assert set(found) <= {ERROR_EVENT, CUT_OFF}
        assert ERROR_EVENT in found
        assert {one.error["code"] for one in running if one.error} == {503}
    await until(lambda: not any(map(is_alive, pids)))
    with pytest.raises(httpx.ConnectError):
        await answers(served)
