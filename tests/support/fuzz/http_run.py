"""A fuzz run: a server, steady streams, and cases beside them; then what is wrong and left."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
from support.fuzz.http_cases import Case, Garbage, make_cases
from support.fuzz.http_clients import (
    ANSWER_TIMEOUT_S,
    FuzzOutcome,
    SteadyStreams,
    send,
    steady_bodies,
    text_of,
)
from support.fuzz.http_server import (
    KEY_HEADER,
    FuzzedServer,
    HealthWatch,
    ServerHoldings,
    holdings,
    served,
)
from support.fuzz.http_values import MARKER

SEED = 15
WORKERS = 6
# The first cases fill what is made on demand: pools of threads, files that libraries keep open.
WARM_UP_CASES = 24
WARM_UP_SEED = 1
# What is made on demand and kept, and may not have been needed before the cases: connections that
# the system still ends; the threads of asyncio's pool (the processors and 4), of `off_loop`'s (4)
# and of the tokenizer's. A leak is one for each of many cases.
SLACK_FDS = 4
# The API's; and the one that follows forms, started when the first form comes and anew when stuck.
OWN_PROCESSES = 2
SLACK_THREADS = 8 + 2 * (os.cpu_count() or 1)
SETTLE_TIMEOUT_S = 30.0
SHOWN_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzReport:
    """What a fuzz run found.

    faults          of answers, streams, `/health`, and of what was left behind: one line each
    statuses        how often each HTTP status was answered; 0: the client had left
    steady_streams  ended steady streams; `steady_refused` times the server was full for one
    health_max_s    the slowest answer of `/health`; the server computed for `health_max_cpu_s` of
                    it, in all of its threads together, and `health_cases` ran meanwhile
    """

    cases: int
    seconds: float
    faults: tuple[str, ...]
    statuses: dict[int, int]
    steady_streams: int
    steady_refused: int
    health_polls: int
    health_max_s: float
    health_p99_s: float
    health_max_cpu_s: float
    health_cases: tuple[str, ...]
    slowest_case_s: float
    slowest_case: str
    before: ServerHoldings
    after: ServerHoldings


def fuzz(num_cases: int, folder: Path, *, seed: int = SEED, workers: int = WORKERS) -> FuzzReport:
    """Serve the demo model and send it so many cases; the server's log is left in the folder.

    workers  cases that are under way at once
    """
    with served(folder) as server:
        answer = httpx.get(f"{server.url}/openapi.json", headers=KEY_HEADER)
        document = answer.raise_for_status().json()
        warm_up = make_cases(document, WARM_UP_CASES, WARM_UP_SEED)
        cases = make_cases(document, num_cases, seed)
        return asyncio.run(_run(server, warm_up, cases, workers))


async def _run(
    server: FuzzedServer, warm_up: list[Case], cases: list[Case], workers: int
) -> FuzzReport:
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=server.url, headers=KEY_HEADER, timeout=ANSWER_TIMEOUT_S, limits=limits
    ) as client:
        bodies = steady_bodies()
        expected = [await text_of(client, body, drafted=False) for body in bodies]
        steady = SteadyStreams(bodies, expected)
        await _until_done(steady, client, warm_up, workers)
        before = await _settled(server, None)
        begun = time.monotonic()
        with HealthWatch(server) as health:
            outcomes = await _until_done(steady, client, cases, workers)
        seconds = time.monotonic() - begun
        after = await _settled(server, before)
    worst = health.slowest
    faults = [f"{outcome.fault}: {shown(outcome.case)}" for outcome in outcomes if outcome.fault]
    faults += [*steady.faults, *health.faults, *left_behind(before, after), *logged(server.log)]
    slowest = max(outcomes, key=lambda one: one.ended - one.begun)
    times = sorted(poll.seconds for poll in health.polls)
    return FuzzReport(
        cases=len(outcomes),
        seconds=round(seconds, 1),
        faults=tuple(faults),
        statuses=dict(sorted(Counter(outcome.status for outcome in outcomes).items())),
        steady_streams=steady.num_streams,
        steady_refused=steady.num_refused,
        health_polls=len(times),
        health_max_s=round(worst.seconds, 4),
        health_p99_s=round(times[int(0.99 * len(times))], 4) if times else 0.0,
        health_max_cpu_s=round(worst.cpu_s, 2),
        health_cases=tuple(_during(outcomes, worst.begun, worst.begun + worst.seconds)),
        slowest_case_s=round(slowest.ended - slowest.begun, 2),
        slowest_case=shown(slowest.case),
        before=before,
        after=after,
    )


async def _until_done(
    steady: SteadyStreams, client: httpx.AsyncClient, cases: list[Case], workers: int
) -> list[FuzzOutcome]:
    """All cases, beside the steady streams."""
    stop = asyncio.Event()
    streams = asyncio.create_task(steady.run(client, stop))
    waiting = iter(cases)
    outcomes: list[FuzzOutcome] = []

    async def work() -> None:
        for case in waiting:
            outcomes.append(await send(client, case))

    await asyncio.gather(*(work() for _ in range(workers)))
    stop.set()
    await streams
    return outcomes


async def _settled(server: FuzzedServer, before: ServerHoldings | None) -> ServerHoldings:
    """What the server holds once it is at rest, or after a while of waiting for that."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        found = await asyncio.to_thread(holdings, server)
        is_idle = not left_behind(before or found, found)
        if is_idle or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)


def left_behind(before: ServerHoldings, after: ServerHoldings) -> list[str]:
    """What a server at rest holds that it did not hold before."""
    most = {
        "fds": before.fds + SLACK_FDS,
        "threads": before.threads + SLACK_THREADS,
        "processes": max(before.processes, OWN_PROCESSES),
        "running": 0,
        "waiting": 0,
        "kv_usage": 0.0,
    }
    return [
        f"left behind: {name} {getattr(after, name)}, before {getattr(before, name)}"
        for name, limit in most.items()
        if getattr(after, name) > limit
    ]


def logged(log: Path) -> list[str]:
    """Lines of a log that hold text of a request, or tell of an error that nobody foresaw."""
    lines = log.read_text(errors="replace").splitlines()
    found = [f"logged: {line[:SHOWN_CHARS]}" for line in lines if MARKER in line]
    return found + [f"traceback: {line}" for line in lines if line.startswith("Traceback")]


def shown(case: Case) -> str:
    """A case, shortened."""
    if isinstance(case, Garbage):
        return f"{case.kind} {b''.join(case.pieces)[:SHOWN_CHARS]!r}"
    return f"{case.kind} {case.path} {case.body[:SHOWN_CHARS]!r} of {len(case.body)} bytes"


def _during(outcomes: Iterable[FuzzOutcome], begun: float, ended: float) -> Iterable[str]:
    """The cases that were under way between two times."""
    for outcome in outcomes:
        if outcome.begun < ended and outcome.ended > begun:
            yield shown(outcome.case)
