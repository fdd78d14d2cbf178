"""Drafters behind gRPC."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import pytest
from support.servers.hub_fixtures import serve

__all__ = ["serve", "start_process"]

StartProcess = Callable[
    [Mapping[str, object], int], Awaitable[tuple[asyncio.subprocess.Process, int]]
]


@pytest.fixture
async def start_process() -> AsyncIterator[StartProcess]:
    """Starts servers at a port, each in a process; gives their ports. None outlives the test."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(
        config: Mapping[str, object], port: int
    ) -> tuple[asyncio.subprocess.Process, int]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "draftline.actors.drafter_server"),
            *("--config", json.dumps(config), "--port", str(port)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("ready port="), line
        return process, int(line.removeprefix("ready port="))

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.wait()
