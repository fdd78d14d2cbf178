"""What the soak makes wrong: a slow network, a full disk, and those that it ends and starts."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from draftline.benchmarks.serving.ray_servers import tree
from draftline.benchmarks.serving.soak.faults import (
    CASES,
    DISK,
    NETWORK,
    REDIS,
    Action,
    Fault,
    Faults,
    Targets,
    make_faults,
)
from draftline.benchmarks.serving.soak.owned_servers import Disk, NetworkProxies

DELAY_S = 0.2


@pytest.fixture
def echo() -> socket.socket:
    """A server that says what it hears to the first who comes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listener, listener.accept()[0] as end:
            while heard := end.recv(1024):
                end.sendall(heard)

    threading.Thread(target=answer, daemon=True).start()
    return listener


def test_a_slow_network_carries_all_later(echo: socket.socket) -> None:
    port = echo.getsockname()[1]
    with (
        NetworkProxies(port) as network,
        socket.create_connection(("127.0.0.1", network.port)) as end,
    ):
        end.sendall(b"one")
        assert end.recv(16) == b"one"
        network.delay_s = DELAY_S
        began_at = time.monotonic()
        end.sendall(b"two")
        assert end.recv(16) == b"two"
        assert time.monotonic() - began_at >= 2 * DELAY_S, "it goes there and back"
        end.shutdown(socket.SHUT_WR)
        assert end.recv(16) == b"", "ends are told, too"


def test_nobody_listens_behind_a_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        NetworkProxies(port) as network,
        socket.create_connection(("127.0.0.1", network.port)) as end,
    ):
        assert end.recv(16) == b""


def test_a_full_disk_takes_nothing_until_it_is_freed(tmp_path: Path) -> None:
    with Disk(tmp_path / "d", "2m") as disk:
        if not disk.is_own:
            pytest.skip("no file system may be mounted here")
        disk.fill()
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (disk.folder / "file").write_bytes(b"x" * 8192)
        disk.free()
        (disk.folder / "file").write_bytes(b"x" * 8192)
    assert not (tmp_path / "d" / "file").exists(), "it went with the disk"


class Sleeper:
    """Something of the benchmark's own."""

    def __init__(self) -> None:
        self.pid: int | None = os.getpid()
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def lose(self) -> None:
        self.calls.append("lose")


async def done_of(
    tmp_path: Path, victim: str, action: Action, owned: Sleeper, network: NetworkProxies
) -> tuple[int | None, float]:
    disk = Disk(tmp_path)
    targets = Targets(roots=tuple, owned={REDIS: [owned]}, disk=disk, networks=[network])
    faults = Faults(Random(0), targets)
    slowest = 0.0

    async def watch() -> None:
        nonlocal slowest
        while True:
            slowest = max(slowest, network.delay_s)
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    await faults.run([Fault(victim, action, 0.0, 0.1)], time.monotonic())
    watching.cancel()
    [done] = faults.done
    assert done.ended_at >= done.began_at
    return done.pid, slowest


@pytest.fixture
def network() -> Iterator[NetworkProxies]:
    with NetworkProxies(1) as network:
        yield network


async def test_faults_meet_their_victims(tmp_path: Path, network: NetworkProxies) -> None:
    owned = Sleeper()
    assert await done_of(tmp_path, REDIS, "kill", owned, network) == (os.getpid(), 0.0)
    assert owned.calls == ["lose", "start"]
    _, slowest = await done_of(tmp_path, NETWORK, "slow", owned, network)
    assert slowest > 0.0
    assert network.delay_s == 0.0


async def test_faults_tell_that_they_met_nobody(tmp_path: Path, network: NetworkProxies) -> None:
    owned = Sleeper()
    owned.pid = None
    assert await done_of(tmp_path, REDIS, "kill", owned, network) == (None, 0.0)
    assert not owned.calls
    assert await done_of(tmp_path, "stage", "kill", owned, network) == (None, 0.0)
    # No file system of its own: this machine's must not be filled.
    assert await done_of(tmp_path, DISK, "fill", owned, network) == (None, 0.0)


def test_all_kinds_of_faults_take_their_turn() -> None:
    faults = make_faults(Random(0), 20.0 * (len(CASES) + 1), 20.0)
    assert [(fault.victim, fault.action) for fault in faults] == list(CASES)
    assert len({fault.at_s for fault in faults}) == len(CASES)


def test_a_tree_has_its_roots() -> None:
    assert os.getpid() in {process.pid for process in tree(os.getpid())}
    assert tree() == []
