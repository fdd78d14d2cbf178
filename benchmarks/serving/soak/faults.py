"""Who is killed or paused when, and the doing of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Literal

from ..on_ray.processes import PROC, pids_of
from .redis_server import RedisServer

# kill        SIGKILL; Redis is started again after `seconds`
# pause       SIGSTOP, and SIGCONT after `seconds`
# pause_kill  SIGSTOP, and SIGKILL after `seconds`
Action = Literal["kill", "pause", "pause_kill"]
REDIS = "redis"
# All of them take their turn; ingresses and coordinators, which have requests, do more often.
CASES: Sequence[tuple[str, Action]] = (
    ("coordinator", "kill"), ("stage", "kill"), ("drafter", "kill"), ("ingress", "pause"),
    ("coordinator", "pause"), (REDIS, "kill"), ("stage", "pause"), ("coordinator", "kill"),
    ("drafter", "pause"), ("stage", "pause_kill"), ("ingress", "kill"),
    ("coordinator", "pause_kill"), (REDIS, "pause"), ("drafter", "pause_kill"),
)  # fmt: skip
SECONDS = (1.0, 9.0)


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

    pid       whom it met; None: there was no such process
    ended_at  when it was over: the pause, or Redis' absence
    """

    fault: Fault
    pid: int | None
    began_at: float
    ended_at: float


def make_faults(rng: Random, seconds: float, fault_s: float) -> list[Fault]:
    """One every `fault_s`, the last early enough to be over by the end."""
    count = max(int(seconds / fault_s) - 1, 1)
    return [
        Fault(*CASES[index % len(CASES)], (index + 1) * fault_s, rng.uniform(*SECONDS))
        for index in range(count)
    ]


class Faults:
    """Makes the faults of a plan at one server. `done` has those that were."""

    def __init__(self, rng: Random, server: int, redis: RedisServer) -> None:
        self._rng = rng
        self._server = server
        self._redis = redis
        self.done: list[Done] = []

    async def run(self, plan: Sequence[Fault], began_at: float) -> None:
        """Until the last one is over."""
        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(began_at + fault.at_s - time.monotonic())
                group.create_task(self._make(fault))

    async def _make(self, fault: Fault) -> None:
        began_at = time.monotonic()
        pid = self._victim(fault.victim)
        if pid is not None:
            await self._do(fault, pid)
        self.done.append(Done(fault, pid, began_at, time.monotonic()))

    def _victim(self, victim: str) -> int | None:
        if victim == REDIS:
            return self._redis.pid
        pids = [pid for pid in pids_of(victim, self._server) if not is_stopped(pid)]
        return self._rng.choice(pids) if pids else None

    async def _do(self, fault: Fault, pid: int) -> None:
        is_redis = fault.victim == REDIS
        _signal(pid, signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
        if fault.action == "kill" and not is_redis:
            return
        await asyncio.sleep(fault.seconds)
        if fault.action == "kill":
            await asyncio.to_thread(self._redis.restart)
        else:
            _signal(pid, signal.SIGKILL if fault.action == "pause_kill" else signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    """Whether a process is paused."""
    with suppress(OSError):
        stat = (PROC / str(pid) / "stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"
    return False


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
