"""Who is killed, paused, filled or slowed when, and the doing of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from ..ray_servers import PROC, TITLES, pids_of
from .owned_servers import Disk, NetworkProxies

# kill        SIGKILL; whom Ray does not replace is started again after `seconds`
# pause       SIGSTOP, and SIGCONT after `seconds`
# pause_kill  SIGSTOP, and SIGKILL after `seconds`
# fill        no room is left for `seconds`
# slow        each piece takes longer for `seconds`
Action = Literal["kill", "pause", "pause_kill", "fill", "slow"]
REDIS, RETRIEVAL, NODE, DISK, NETWORK = "redis", "retrieval", "node", "disk", "network"
# All of them take their turn; ingresses and coordinators, which have requests, do more often.
CASES: Sequence[tuple[str, Action]] = (
    ("coordinator", "kill"), ("stage", "kill"), (RETRIEVAL, "kill"), ("ingress", "pause"),
    ("coordinator", "pause"), (REDIS, "kill"), ("stage", "pause"), (NETWORK, "slow"),
    (NODE, "kill"), ("drafter", "kill"), (DISK, "fill"), ("drafter", "pause"),
    ("coordinator", "kill"), (RETRIEVAL, "pause"), ("stage", "pause_kill"), ("ingress", "kill"),
    ("coordinator", "pause_kill"), (REDIS, "pause"), ("drafter", "pause_kill"),
)  # fmt: skip
SECONDS = (1.0, 9.0)
SLOW_S = (0.02, 0.2)
# Of faults that meet no process.
NO_PROCESS = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to happen, `at_s` from the start; `seconds`: how long a pause or an absence lasts."""

    victim: str
    action: Action
    at_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """What happened, by the clock of `time.monotonic`.

    pid       whom it met; None: there was nothing to meet
    ended_at  when it was over: the pause, or the absence
    lost      parts of the server that ended by it, by the names of `TITLES`
    """

    fault: Fault
    pid: int | None
    began_at: float
    ended_at: float
    lost: frozenset[str] = frozenset()


class Owned(Protocol):
    """What the benchmark started and starts again, as a supervisor would."""

    @property
    def pid(self) -> int | None:
        """Its first process; None: it does not run."""
        ...

    def start(self) -> None:
        """Start it again."""
        ...

    def lose(self) -> None:
        """End it at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What faults may meet.

    roots     processes that all of the server's come from, at the moment
    owned     what is not the server's own, by victim
    networks  what faults of the network slow
    """

    roots: Callable[[], Sequence[int]]
    owned: Mapping[str, Sequence[Owned]]
    disk: Disk
    networks: Sequence[NetworkProxies]


def make_faults(rng: Random, seconds: float, fault_s: float) -> list[Fault]:
    """One every `fault_s`, the last early enough to be over by the end."""
    count = max(int(seconds / fault_s) - 1, 1)
    return [
        Fault(*CASES[index % len(CASES)], (index + 1) * fault_s, rng.uniform(*SECONDS))
        for index in range(count)
    ]


class Faults:
    """Makes the faults of a plan at one server. `done` has those that were."""

    def __init__(self, rng: Random, targets: Targets) -> None:
        self._rng = rng
        self._targets = targets
        self.done: list[Done] = []

    async def run(self, plan: Sequence[Fault], began_at: float) -> None:
        """Until the last one is over."""
        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(began_at + fault.at_s - time.monotonic())
                group.create_task(self._make(fault))

    async def _make(self, fault: Fault) -> None:
        began_at = time.monotonic()
        if fault.victim == DISK:
            pid, lost = await self._fill(fault), frozenset[str]()
        elif fault.victim == NETWORK:
            pid, lost = await self._slow(fault), frozenset[str]()
        elif fault.victim in TITLES:
            pid, lost = await self._meet(fault)
        else:
            pid, lost = await self._meet_owned(fault)
        self.done.append(Done(fault, pid, began_at, time.monotonic(), lost))

    async def _fill(self, fault: Fault) -> int | None:
        disk = self._targets.disk
        if not disk.is_own:
            return None
        await asyncio.to_thread(disk.fill)
        await asyncio.sleep(fault.seconds)
        disk.free()
        return NO_PROCESS

    async def _slow(self, fault: Fault) -> int:
        for network in self._targets.networks:
            network.delay_s = self._rng.uniform(*SLOW_S)
        await asyncio.sleep(fault.seconds)
        for network in self._targets.networks:
            network.delay_s = 0.0
        return NO_PROCESS

    async def _meet(self, fault: Fault) -> tuple[int | None, frozenset[str]]:
        """A part of the server, which Ray and the server themselves replace."""
        roots = self._targets.roots()
        pids = [pid for pid in pids_of(fault.victim, *roots) if not is_stopped(pid)]
        if not pids:
            return None, frozenset()
        pid = self._rng.choice(pids)
        if fault.action != "kill":
            _signal(pid, signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
        if fault.action == "pause":
            _signal(pid, signal.SIGCONT)
            return pid, frozenset()
        _signal(pid, signal.SIGKILL)
        return pid, frozenset({fault.victim})

    async def _meet_owned(self, fault: Fault) -> tuple[int | None, frozenset[str]]:
        ones = [one for one in self._targets.owned[fault.victim] if one.pid is not None]
        if not ones:
            return None, frozenset()
        one = self._rng.choice(ones)
        pid = one.pid
        assert pid is not None
        if fault.action == "pause":
            _signal(pid, signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            _signal(pid, signal.SIGCONT)
            return pid, frozenset()
        lost = frozenset(part for part in TITLES if pids_of(part, pid))
        await asyncio.to_thread(one.lose)
        await asyncio.sleep(fault.seconds)
        await asyncio.to_thread(one.start)
        return pid, lost


def is_stopped(pid: int) -> bool:
    """Whether a process is paused."""
    with suppress(OSError):
        stat = (PROC / str(pid) / "stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"
    return False


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
