"""Faults on Ray while streams run: what their clients see, and when the server serves again.

    python -m draftline.benchmarks.serving.faults [--cases stage:SIGKILL,coordinator:SIGSTOP]

Serves the demo model over two stages and a drafter actor by `draftline serve`, as a user does.
For each case it starts streams, sends the signal to one process, and polls `/health` and short
requests. A process that was stopped, and that nobody killed, is killed at the end of its case.
Prints a table and writes JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from ...deploy.cli.demo.prompts import held_out_prompts
from ...measure.records import machine
from .ray_servers import pids_of, served

RESULTS = Path(__file__).parents[1] / "results" / "faults.json"
CASES = ",".join(
    f"{victim}:{name}"
    for victim in ("drafter", "stage", "coordinator")
    for name in ("SIGKILL", "SIGSTOP")
)
POLL_S = 0.1
PROBE_TIMEOUT_S = 5.0
RECOVERY_TIMEOUT_S = 180.0
STREAM_TIMEOUT_S = 240.0
# Streams are well under way when the fault comes.
EVENTS_BEFORE = 5
# Spare processes finish their imports, and Ray Serve its own recovery, between two cases.
PAUSE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """How one stream ended: `whole` with the text of an undisturbed one, `other` with another,
    `error` with an error event, `cut` without any end. `after_s` counts from the fault."""

    kind: str
    after_s: float
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault. Seconds count from the signal; None: it did not happen.

    unhealthy_s    `/health` was no 200 for the first time
    healthy_s      it was 200 again, after that
    served_s       the first request that was sent after the fault and answered
    """

    victim: str
    signal: str
    streams: tuple[StreamEnd, ...]
    unhealthy_s: float | None
    healthy_s: float | None
    served_s: float | None


@dataclass(frozen=True, slots=True)
class FaultRun:
    """The server, its process, and what is asked of it."""

    url: str
    pid: int
    num_streams: int
    tokens: int
    pause_s: float


def main(
    *,
    cases: Annotated[str, typer.Option(help="victim:signal, comma-separated.")] = CASES,
    streams: Annotated[int, typer.Option(help="Streams that run at the fault.")] = 6,
    tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 800,
    step_timeout_s: Annotated[float, typer.Option(help="The server's setting.")] = 3.0,
    pause_s: Annotated[float, typer.Option(help="Seconds between two cases.")] = PAUSE_S,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Run all cases against one server."""
    settings = {
        "model": "demo",
        "backend": "ray",
        "pipeline_parallel_size": 2,
        "step_timeout_s": step_timeout_s,
        "drafters": [{"kind": "spectra", "transport": "grpc"}],
    }
    report = {
        "command": f"python -m draftline.benchmarks.serving.faults --cases {cases} "
        f"--streams {streams} --tokens {tokens} --step-timeout-s {step_timeout_s:g} "
        f"--pause-s {pause_s:g}",
        "machine": machine().fields(),
        "versions": {name: metadata.version(name) for name in ("draftline", "ray")},
        "load_average_before": os.getloadavg(),
        "settings": settings,
        "streams": streams,
        "tokens": tokens,
    }
    results: list[Case] = []

    def note(case: Case) -> None:
        # A case that is never done must not cost those before it.
        results.append(case)
        done = report | {"cases": [asdict(one) for one in results]}
        output.write_text(json.dumps(done, indent=1) + "\n")

    chosen = [case.partition(":") for case in cases.split(",")]
    with served(settings) as server:
        run = FaultRun(server.url, server.pid, streams, tokens, pause_s)
        asyncio.run(_run_all(run, [(victim, name) for victim, _, name in chosen], note))
    Console().print(_table(results))


async def _run_all(
    run: FaultRun, cases: list[tuple[str, str]], note: Callable[[Case], None]
) -> None:
    prompts = [prompt.text for prompt in held_out_prompts(run.num_streams)]
    async with httpx.AsyncClient(base_url=run.url, timeout=STREAM_TIMEOUT_S) as client:
        plain = await asyncio.gather(*(_text(client, prompt, run.tokens) for prompt in prompts))
        expected = dict(zip(prompts, plain, strict=True))
        for victim, name in cases:
            await asyncio.sleep(run.pause_s)
            note(await _run(client, victim, name, expected, run))


async def _run(
    client: httpx.AsyncClient, victim: str, name: str, expected: dict[str, str], run: FaultRun
) -> Case:
    fault: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    started = [asyncio.Event() for _ in expected]
    running = [
        asyncio.ensure_future(_stream(client, text, _body(prompt, run.tokens), begun, fault))
        for (prompt, text), begun in zip(expected.items(), started, strict=True)
    ]
    await asyncio.gather(*(begun.wait() for begun in started))
    pid = max(pids_of(victim, run.pid))
    fault.set_result(time.monotonic())
    os.kill(pid, getattr(signal, name))
    health = asyncio.ensure_future(_watch_health(client, fault.result()))
    served_s = await _first_answer(client, fault.result())
    ends = tuple(await asyncio.gather(*running))
    # Whoever is still unhealthy gets some more time to say that it is well again.
    await asyncio.sleep(1.0)
    health.cancel()
    unhealthy_s, healthy_s = await health
    if name == "SIGSTOP" and pid in pids_of(victim, run.pid):
        os.kill(pid, signal.SIGKILL)
    return Case(
        victim=victim,
        signal=name,
        streams=ends,
        unhealthy_s=unhealthy_s,
        healthy_s=healthy_s,
        served_s=served_s,
    )


async def _stream(
    client: httpx.AsyncClient,
    expected: str,
    body: dict[str, Any],
    begun: asyncio.Event,
    fault: asyncio.Future[float],
) -> StreamEnd:
    def end(kind: str, error: str = "") -> StreamEnd:
        begun.set()
        since = fault.result() if fault.done() else time.monotonic()
        return StreamEnd(kind=kind, after_s=round(time.monotonic() - since, 2), error=error)

    text = ""
    try:
        async with _events(client, body) as events:
            count = 0
            async for event in events:
                if event == "[DONE]":
                    return end("whole" if text == expected else "other")
                data = json.loads(event)
                if "error" in data:
                    return end("error", str(data["error"]["message"]))
                text += data["choices"][0]["text"]
                count += 1
                if count == EVENTS_BEFORE:
                    begun.set()
    except httpx.HTTPError as error:
        return end("cut", type(error).__name__)
    return end("cut")


@asynccontextmanager
async def _events(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> AsyncIterator[AsyncIterator[str]]:
    sent = body | {"stream": True}
    async with client.stream("POST", "/v1/completions", json=sent) as response:
        lines = response.aiter_lines()
        yield (line.removeprefix("data: ") async for line in lines if line)


async def _text(client: httpx.AsyncClient, prompt: str, tokens: int) -> str:
    answer = await client.post("/v1/completions", json=_body(prompt, tokens))
    return answer.raise_for_status().json()["choices"][0]["text"]


async def _watch_health(
    client: httpx.AsyncClient, since: float
) -> tuple[float | None, float | None]:
    """When `/health` was not 200 first, and when it was 200 again; polls until cancelled."""
    unhealthy_s: float | None = None
    healthy_s: float | None = None
    with suppress(asyncio.CancelledError):
        while True:
            is_healthy = False
            with suppress(httpx.HTTPError):
                answer = await client.get("/health", timeout=PROBE_TIMEOUT_S)
                is_healthy = answer.status_code == httpx.codes.OK
            now = round(time.monotonic() - since, 2)
            if not is_healthy and unhealthy_s is None:
                unhealthy_s = now
            if not is_healthy:
                healthy_s = None
            elif unhealthy_s is not None and healthy_s is None:
                healthy_s = now
            await asyncio.sleep(POLL_S)
    return unhealthy_s, healthy_s


async def _first_answer(client: httpx.AsyncClient, since: float) -> float | None:
    """When a request that was sent after the fault had its answer."""
    body = _body("def f(x):", 4)
    while time.monotonic() - since < RECOVERY_TIMEOUT_S:
        with suppress(httpx.HTTPError):
            answer = await client.post("/v1/completions", json=body, timeout=RECOVERY_TIMEOUT_S)
            if answer.status_code == httpx.codes.OK:
                return round(time.monotonic() - since, 2)
        await asyncio.sleep(POLL_S)
    return None


def _body(prompt: str, tokens: int) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _table(cases: list[Case]) -> Table:
    table = Table(
        "victim", "signal", "streams", "ended after s", "unhealthy s", "healthy s", "served s"
    )
    for case in cases:
        kinds = [end.kind for end in case.streams]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        last = max(end.after_s for end in case.streams)
        times = (case.unhealthy_s, case.healthy_s, case.served_s)
        table.add_row(case.victim, case.signal, counts, str(last), *map(str, times))
    return table


if __name__ == "__main__":
    typer.run(main)
