"""A soak from its start to its judgement and its report."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from ....measure.records import machine
from ..ray_servers import Process
from .clients import SoakAnswer, answer_of
from .faults import Done, Fault, Faults, make_faults
from .judge import Outcome, SoakVerdict, judge, outcomes_of, plain_answers
from .owned_servers import OwnedDrafterServer
from .setup import DEADLINE_S, OPERATOR, Setup, SoakPrompt, make_plan, set_up, settings_of
from .watch import SETTLE_S, Holdings, Watch, key_leaks, process_leaks, wait_for_quiet

WARM_UP_REQUESTS = 24
WARM_UP_S = 5.0
REVIVE_S = 1.0
RESUMED = re.compile(r"event=request_resumed request_id=(\S+)-\d+ ")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSetting:
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
class SoakPlan:
    """What is sent and done."""

    warm_up: Sequence[SoakPrompt]
    asks: Sequence[SoakPrompt]
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
    answers: Sequence[SoakAnswer]
    faults: Sequence[Done]
    counters: Mapping[str, Mapping[str, int]]
    holdings: Holdings | None
    before: Sequence[Process]
    after: Sequence[Process]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakFindings:
    """What came of a soak. `leaks`: what was left at the end; `seconds`: it all took."""

    outcomes: Sequence[Outcome]
    verdict: SoakVerdict
    served: Served
    leaks: Sequence[str]
    seconds: float

    @property
    def problems(self) -> list[str]:
        """What must not be; empty: all is well."""
        return [*self.verdict.problems, *self.leaks]


def soak(setting: SoakSetting) -> SoakFindings:
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
    return SoakFindings(
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


def _plan(setting: SoakSetting, rng: Random) -> SoakPlan:
    seconds = 60.0 * setting.minutes
    faults = make_faults(rng, seconds, setting.fault_s)
    return SoakPlan(
        warm_up=make_plan(rng, WARM_UP_REQUESTS, WARM_UP_S, ()),
        asks=make_plan(rng, setting.requests, seconds, [fault.at_s for fault in faults]),
        faults=faults,
    )


async def _serve(at: Setup, setting: SoakSetting, plan: SoakPlan, faults: Faults) -> Served:
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


async def _revive(servers: Sequence[OwnedDrafterServer]) -> None:
    """What a supervisor does, until cancelled."""
    while True:
        for server in servers:
            server.revive()
        await asyncio.sleep(REVIVE_S)


async def _send(
    client: httpx.AsyncClient, at: Setup, asks: Sequence[SoakPrompt]
) -> list[SoakAnswer]:
    """Send each at its time, whatever became of those before; how each ended."""
    began_at = time.monotonic()

    async def send(ask: SoakPrompt) -> SoakAnswer:
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


LIBRARIES = ("draftline", "ray", "redis", "httpx")


def report_of(
    setting: SoakSetting, found: SoakFindings, load_before: Sequence[float]
) -> dict[str, Any]:
    """All that is kept of it."""
    verdict, served = found.verdict, found.served
    return {
        "command": "python -m draftline.benchmarks.serving.soak "
        f"--minutes {setting.minutes:g} --requests {setting.requests} "
        f"--fault-s {setting.fault_s:g} --seed {setting.seed} "
        f"--replicas {setting.replicas} --stages {setting.stages}",
        "machine": machine().fields(),
        "versions": {name: metadata.version(name) for name in LIBRARIES},
        "load_average_before": load_before,
        "settings": settings_of(
            "redis://",
            ["host:port"],
            setting.replicas,
            setting.stages,
            model_drafters=setting.model_drafters,
        ),
        "seconds": found.seconds,
        "faults": _faults(served.faults),
        "ends": verdict.ends,
        "kinds": _kinds(found),
        "tokens_compared": verdict.tokens,
        "interrupted_streams": verdict.interrupted,
        "resumed_with_the_right_text": verdict.resumed,
        "counters": served.counters,
        "slowest_s": verdict.slowest_s,
        "errors": verdict.errors,
        "engines_at_the_end": None if served.holdings is None else asdict(served.holdings),
        "processes": {
            "before": _by_role(served.before),
            "after": _by_role(served.after),
        },
        "time_line": _time_line(served),
        "not_right": _not_right(found),
        "problems": found.problems,
    }


def print_report(report: dict[str, Any]) -> None:
    """The same as tables."""
    console = Console()
    table = Table("fault", "times", "not met", box=None)
    for name, counts in report["faults"].items():
        table.add_row(name, str(counts["made"]), str(counts["not_met"]))
    console.print(table)
    table = Table("requests", "", box=None)
    for name, count in sorted(report["ends"].items()):
        table.add_row(name, str(count))
    for name in ("interrupted_streams", "resumed_with_the_right_text", "tokens_compared"):
        table.add_row(name.replace("_", " "), str(report[name]))
    console.print(table)
    for problem in report["problems"] or ["no problem was found"]:
        console.print(problem, markup=False)


def _faults(faults: Sequence[Done]) -> dict[str, dict[str, int]]:
    made: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for done in faults:
        name = f"{done.fault.victim} {done.fault.action}"
        (missed if done.pid is None else made)[name] += 1
    return {
        name: {"made": made[name], "not_met": missed[name]} for name in sorted({*made, *missed})
    }


def _time_line(served: Served) -> list[str]:
    """The faults in order, with seconds from the first request."""
    return [
        f"{done.began_at - served.began_at:.1f} {done.fault.victim} {done.fault.action} "
        f"pid {done.pid}, over at {done.ended_at - served.began_at:.1f}"
        for done in sorted(served.faults, key=lambda done: done.began_at)
    ]


def _not_right(found: SoakFindings) -> list[dict[str, Any]]:
    """Requests that ended otherwise than they should, but for those whose clients left."""
    began_at = found.served.began_at
    return [
        {
            "kind": one.ask.kind,
            "path": one.ask.path,
            "stream": one.ask.body["stream"],
            "id": one.answer.response_id,
            "sent_s": round(one.answer.began_at - began_at, 2),
            "ended_s": round(one.answer.ended_at - began_at, 2),
            "tokens": one.answer.num_tokens,
            "end": one.end,
            "detail": one.answer.detail,
            "was_resumed": one.was_resumed,
            "wrong": one.wrong,
        }
        for one in found.outcomes
        if one.wrong is not None or one.end not in ("whole", "left")
    ]


def _kinds(found: SoakFindings) -> dict[str, dict[str, int]]:
    """Requests by what they asked for, and how they ended."""
    kinds: dict[str, Counter[str]] = {}
    for one in found.outcomes:
        kinds.setdefault(one.ask.kind, Counter())[one.end] += 1
    return {name: dict(counts) for name, counts in sorted(kinds.items())}


def _by_role(processes: Sequence[Process]) -> dict[str, dict[str, int]]:
    """Of each role: how many processes, and the most that one of them holds."""
    roles: dict[str, list[Process]] = {}
    for process in processes:
        roles.setdefault(process.role, []).append(process)
    return {
        role: {
            "processes": len(ones),
            "threads": max(one.threads for one in ones),
            "fds": max(one.fds for one in ones),
        }
        for role, ones in sorted(roles.items())
    }
