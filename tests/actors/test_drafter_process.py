"""Drafter servers as child processes: loud ones, silent ones, paused ones, and their secrets."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from draftline.actors import drafter_process
from draftline.actors.drafter_process import DrafterProcess
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.replies import DrafterLimits
from draftline.cluster.links.failures import RetryPolicy
from draftline.cluster.links.grpc_link import GrpcLink, GrpcOptions
from draftline.core.errors import DrafterError
from support.fakes.fake_drafters import VOCAB_SIZE
from support.servers.hub_session import LIMITS, HubSession, Rhyme, until
from support.servers.processes import send_signal

ENGINE = EngineConfig(model="demo")
PROMPT_LOOKUP = DrafterConfig(kind="prompt_lookup", name="far", num_matches=1)
PASSWORD = "hunter2-hunter2"
TESTS = Path(__file__).parents[1]
# A paused server is given up within a second or two.
IMPATIENT = DrafterLimits(
    vocab_size=VOCAB_SIZE,
    answer_timeout_s=0.5,
    retry=RetryPolicy(first_delay_s=0.02, max_delay_s=0.1),
)

Start = Callable[..., DrafterProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes processes that end with the test."""
    processes: list[DrafterProcess] = []

    def make(config: DrafterConfig = PROMPT_LOOKUP, **options: float) -> DrafterProcess:
        processes.append(DrafterProcess(config, ENGINE, **options))
        return processes[-1]

    yield make
    for process in processes:
        process.stop()


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children run `support.fakes.odd_server`."""
    monkeypatch.setattr(drafter_process, "MODULE", "support.fakes.odd_server")
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def link_to(process: DrafterProcess, **options: float) -> GrpcLink:
    options = GrpcOptions(token=process.token, **options)
    return GrpcLink("far", process.address, options, replace=process.replace)


def pid_of(process: DrafterProcess) -> int:
    assert process._child is not None
    return process._child.pid


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def arguments_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


@pytest.mark.usefixtures("odd")
async def test_a_drafter_that_logs_thousands_of_errors_keeps_answering(start, caplog):
    caplog.set_level(logging.WARNING)
    process = start(DrafterConfig(kind="prompt_lookup", name="far"))
    hub = DrafterHub([link_to(process)], LIMITS)
    await hub.start(timeout_s=60.0)
    session = HubSession(hub)
    for _ in range(20):
        (proposal,) = await session.step(1, budget_s=30.0)
        assert proposal.tokens.tolist() == session.expected(4)
    await hub.stop()
    lines = [record.message for record in caplog.records if "noise" in record.message]
    assert lines
    assert lines[0].startswith("drafter=far ")
    assert len(lines) < 500, "most of 40,000 lines are counted only"
    process.stop()
    deadline = time.monotonic() + 30
    while not any("event=lines_left_out" in record.message for record in caplog.records):
        assert time.monotonic() < deadline, "nobody says that lines were left out"
        await asyncio.sleep(0.01)
    process.stop()
    with pytest.raises(DrafterError, match="closed"):
        await process.address()


async def test_a_paused_server_is_replaced_and_proposals_come_again(start):
    process = start()
    hub = DrafterHub([link_to(process, connect_timeout_s=0.5)], IMPATIENT)
    await hub.start(timeout_s=60.0)
    rhyme = Rhyme(hub)
    await until(rhyme.step)
    paused = pid_of(process)
    send_signal(paused, signal.SIGSTOP)
    await until(rhyme.is_silent)
    await until(rhyme.step)
    assert pid_of(process) != paused
    assert is_gone(paused)
    assert hub.stats()[0].connected
    await hub.stop()


@pytest.mark.usefixtures("odd")
async def test_a_process_that_hangs_before_it_is_ready_is_ended(start):
    process = start(DrafterConfig(kind="prompt_lookup", name="silent"), start_timeout_s=0.5)
    with pytest.raises(DrafterError, match=r"said nothing within 0\.5 s"):
        await process.address()
    assert is_gone(pid_of(process))


async def test_a_process_that_cannot_start_says_why_in_one_line(start):
    process = start(DrafterConfig(kind="retrieval", store="/nowhere/store"))
    with pytest.raises(DrafterError, match=r"^store: no folder /nowhere/store") as caught:
        await process.address()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("odd")
async def test_no_secret_is_among_a_childs_arguments(start):
    url = f"redis://user:{PASSWORD}@127.0.0.1:1/0"
    process = start(DrafterConfig(kind="retrieval", name="far", store=url))
    await process.address()
    arguments = arguments_of(pid_of(process))
    assert "support.fakes.odd_server" in arguments
    assert PASSWORD not in arguments
    assert process.token not in arguments


async def test_a_child_serves_those_with_its_token_and_ends_with_its_parent(start, caplog):
    process = start()
    address = await process.address()
    for token in (None, "x" * 43):
        hub = DrafterHub([GrpcLink("far", address, GrpcOptions(token=token))], LIMITS)
        await hub.start()
        assert await HubSession(hub).step(1) == []
        assert hub.stats()[0].errors
        await hub.stop()
    assert "UNAUTHENTICATED" in caplog.text
    assert "token_env or token_file" in caplog.text
    assert process.token not in caplog.text
    child = process._child
    # The kernel does this when the parent is killed.
    child._process.stdin.close()
    deadline = time.monotonic() + 30
    while child.status is None:
        assert time.monotonic() < deadline, "it outlives its parent"
        await asyncio.sleep(0.01)
    assert child.status == 0


async def test_servers_that_hang_again_and_again_are_replaced_ever_more_seldom():
    """A port that takes connections and never answers; the clock stands still."""
    replaced: list[str] = []

    async def replace() -> None:
        replaced.append("")

    writers: list[asyncio.StreamWriter] = []

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(ignore, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    own = GrpcLink(
        "own", address, GrpcOptions(connect_timeout_s=0.05), replace=replace, clock=lambda: 0.0
    )
    # Somebody else's is tried again, and left alone.
    other = GrpcLink("other", address, GrpcOptions(connect_timeout_s=0.05))
    hub = DrafterHub([own, other], IMPATIENT)
    await hub.start()
    session = HubSession(hub)

    async def has_failed_often() -> bool:
        await session.step(1, budget_s=0.01)
        return all(stats.errors >= 12 for stats in hub.stats())

    await until(has_failed_often)
    assert len(replaced) == 2
    await hub.stop()
    server.close()
    # Clients may leave after the test: what they left open would be told of in another one.
    for writer in writers:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
