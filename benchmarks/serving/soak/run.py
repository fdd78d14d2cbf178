"""A soak from its start to its judgement."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx

from ..on_ray.processes import Process
from .clients import Answer, answer_of
from .faults import Done, Fault, Faults, make_faults
from .judge import Outcome, Verdict, judge, outcomes_of
from .leaks import SETTLE_S, key_leaks, process_leaks, wait_for_quiet
from .owned.retrieval_server import RetrievalServer
from .plan import Ask, make_plan
from .setup import DEADLINE_S, OPERATOR, Setup, set_up
from .verify import plain_answers
from .watch import Holdings, Watch

WARM_UP_REQUESTS = 24
WARM_UP_S = 5.0
REVIVE_S = 1.0
RESUMED = re.compile(r"event=request_resumed request_id=(\S+)-\d+ ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is run.

    fault_s         seconds from one fault to the next
    model_drafters  small models of every kind draft, too
    logs            where Ray's are kept
    """

    minutes: float
    requests: int
    fault_s: float
    seed: int = 0
    replicas: int = 2
    stages: int = 2
    model_drafters: bool = False
    logs: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is sent and done."""

    warm_up: Sequence[Ask]
    asks: Sequence[Ask]
    faults: Sequence[Fault]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What was seen while the server ran.

    began_at  when the first request was due, by `time.monotonic`
    counters  its own counts of resumed and lost requests, by cause
    holdings  of its engines at the end; None: they could not be asked
    before    its processes after the first requests
    after     and at the end
    """

    began_at: float
    answers: Sequence[Answer]
    faults: Sequence[Done]
    counters: Mapping[str, Mapping[str, int]]
    holdings: Holdings | None
    before: Sequence[Process]
    after: Sequence[Process]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a soak. `leaks`: what was left at the end; `seconds`: it all took."""

    outcomes: Sequence[Outcome]
    verdict: Verdict
    served: Served
    leaks: Sequence[str]
    seconds: float

    @property
    def problems(self) -> list[str]:
        """What must not be; empty: all is well."""
        return [*self.verdict.problems, *self.leaks]


def soak(setting: Setting) -> Found:
    """Serve, disturb, compare. Raises `RuntimeError` where the server does not start."""
    began_at = time.monotonic()
    rng = Random(setting.seed)
    plan = _plan(setting, rng)
    with set_up(
        setting.replicas, setting.stages, setting.logs, model_drafters=setting.model_drafters
    ) as at:
        served = asyncio.run(_serve(at, setting, plan, Faults(rng, at.targets())))
        keys = key_leaks(at.redis.url)
        resumed = _resumed(at.logs)
    plain = asyncio.run(plain_answers(plan.asks))
    outcomes = outcomes_of(plan.asks, served.answers, plain, served.faults, resumed)
    left = Counter(process.role for process in at.server.left)
    return Found(
        outcomes=outcomes,
        verdict=judge(outcomes),
        served=served,
        leaks=[
            *_engine_leaks(served.holdings, setting.replicas),
            *process_leaks(served.before, served.after),
            *keys,
            *_unnamed(served.counters, resumed),
            *(f"{count} processes {role} outlived the server" for role, count in left.items()),
        ],
        seconds=round(time.monotonic() - began_at, 1),
    )


def _plan(setting: Setting, rng: Random) -> Plan:
    seconds = 60.0 * setting.minutes
    faults = make_faults(rng, seconds, setting.fault_s)
    return Plan(
        warm_up=make_plan(rng, WARM_UP_REQUESTS, WARM_UP_S, ()),
        asks=make_plan(rng, setting.requests, seconds, [fault.at_s for fault in faults]),
        faults=faults,
    )


async def _serve(at: Setup, setting: Setting, plan: Plan, faults: Faults) -> Served:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=at.server.url, timeout=None, limits=limits) as client:
        watch = Watch(client, at.headers(OPERATOR))
        await wait_for_quiet(watch, setting.replicas)
        await _send(client, at, plan.warm_up)
        await wait_for_quiet(watch, setting.replicas)
        before = at.processes()
        watching = asyncio.create_task(watch.run())
        reviving = asyncio.create_task(_revive(at.retrieval))
        began_at = time.monotonic()
        making = asyncio.create_task(faults.run(plan.faults, began_at))
        answers = await _send(client, at, plan.asks)
        await making
        watching.cancel()
        reviving.cancel()
        holdings = await wait_for_quiet(watch, setting.replicas)
        await asyncio.sleep(SETTLE_S)
        after = at.processes()
    return Served(
        began_at=began_at,
        answers=answers,
        faults=faults.done,
        counters=watch.totals(),
        holdings=holdings,
        before=before,
        after=after,
    )


async def _revive(servers: Sequence[RetrievalServer]) -> None:
    """What a supervisor does, until cancelled."""
    while True:
        for server in servers:
            server.revive()
        await asyncio.sleep(REVIVE_S)


async def _send(client: httpx.AsyncClient, at: Setup, asks: Sequence[Ask]) -> list[Answer]:
    """Send each at its time, whatever became of those before; how each ended."""
    began_at = time.monotonic()

    async def send(ask: Ask) -> Answer:
        await asyncio.sleep(began_at + ask.at_s - time.monotonic())
        return await answer_of(client, ask, at.headers(ask.tenant), DEADLINE_S)

    return await asyncio.gather(*map(send, asks))


def _resumed(folder: Path) -> set[str]:
    """Ids of the answers that another replica went on with, from the logs of all processes."""
    return {
        request_id
        for file in folder.glob("session_*/logs/**/*")
        if file.is_file()
        for request_id in RESUMED.findall(file.read_text(errors="replace"))
    }


def _unnamed(counters: Mapping[str, Mapping[str, int]], resumed: set[str]) -> list[str]:
    """Streams that went on elsewhere, and cannot be told from others without the log."""
    count = sum(counters["resumed"].values())
    return (
        [f"{count} requests were resumed, and no log names them"] if count and not resumed else []
    )


def _engine_leaks(holdings: Holdings | None, replicas: int) -> list[str]:
    if holdings is None:
        return ["nobody told what the engines hold"]
    found = [] if holdings.is_empty else [f"the engines hold {holdings}"]
    if holdings.engines != replicas:
        found.append(f"{holdings.engines} engines of {replicas} are there")
    return found
