"""Two tenants, one flooding: what the quiet one waits, and what each gets of the work.

    python -m draftline.benchmarks.serving.tenants [--requests 200]

Serves the demo model with two tenants of a store. The quiet one streams one request after the
other, each with a prompt of its own, in turns of rounds: alone; beside the other, which keeps three
times as many requests in progress as there are places; and with the other's key, so that both are
one tenant, as it was before tenants had turns. Then both flood, one with half as many requests in
progress, first of equal lengths and then of others, and `/metrics` tells what each got meanwhile:
rows of trees (nodes verified and roots), and the whole work as it is charged, prompts included.
Prints tables, writes JSON. The client runs on the same cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ...core.schedule.shares.fair_share import PROMPT_WEIGHT, ROW_WEIGHT
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.tenants.changes import create_tenant
from ...deploy.tenants.store import open_tenant_store
from ...measure.records.record import machine

RESULTS = Path(__file__).parents[1] / "results" / "tenants.json"
COMMAND = (sys.executable, "-c", "from draftline.deploy.cli.main import main; main()")
DRAFTERS = '[{"kind": "suffix"}, {"kind": "prompt_lookup"}]'
QUIET, FLOOD, OPERATOR = "quiet", "flood", "operator"
# Between two requests of the quiet one, seconds.
PAUSE_S = 0.05
FLOODED_S = 1.5
ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Requests of one kind: letters of the prompt, tokens of the answer."""

    prompt_letters: int
    tokens: int


# The quiet one's, and the flood's.
SHORT, LONG = Kind(prompt_letters=900, tokens=24), Kind(prompt_letters=300, tokens=96)


@dataclass(frozen=True, slots=True)
class Server:
    """A server's port, and the keys by the names of their owners."""

    port: int
    keys: Mapping[str, str]


def main(
    *,
    requests: Annotated[
        int, typer.Option(help="Requests of the quiet tenant, in each case.")
    ] = 200,
    places: Annotated[int, typer.Option(help="Requests that run at once (max_num_seqs).")] = 4,
    seconds: Annotated[float, typer.Option(help="How long both flood.")] = 30.0,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Measure waiting beside a flood, and the parts of two floods."""
    with served(places) as server:
        found = asyncio.run(measure(server, requests, places, seconds))
    _print(found)
    content = {
        "machine": machine().fields(),
        "requests": requests,
        "places": places,
        "seconds": seconds,
        **found,
    }
    output.write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def served(places: int) -> Iterator[Server]:
    """`draftline serve` with a store of two tenants."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "tenants.yaml")
        store = open_tenant_store(path)
        keys = {OPERATOR: OPERATOR}
        for name in (QUIET, FLOOD):
            key = create_tenant(store, name, {})
            assert key is not None
            keys[name] = key.text
        arguments = ["demo", "--port", "0", "--max-num-seqs", str(places), "--tenant-store", path]
        arguments += ["--speculative-config", DRAFTERS]
        environment = os.environ | {
            "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "DRAFTLINE_API_KEY": OPERATOR,
        }  # fmt: skip
        with subprocess.Popen(
            [*COMMAND, "serve", *arguments], stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                lines = list(takewhile(lambda line: not line.startswith("curl "), process.stdout))
                port = re.search(r"ready: http://\S+:(\d+)/v1", lines[-1])
                assert port, lines
                yield Server(int(port[1]), keys)
            finally:
                process.terminate()


async def measure(server: Server, requests: int, places: int, seconds: float) -> dict[str, Any]:
    """First tokens in the three cases, and the parts of two floods."""
    rng = Random(0)
    first: dict[str, list[float]] = {"alone": [], "flooded": [], "one tenant": []}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", timeout=None,
        limits=httpx.Limits(max_connections=None),
    ) as client:  # fmt: skip
        caller = _Client(client, server, rng)
        # Compiles what is compiled, and teaches the budget.
        await caller.first_tokens(QUIET, 20)
        for _ in range(ROUNDS):
            count = requests // ROUNDS
            first["alone"] += await caller.first_tokens(QUIET, count)
            async with caller.flood(FLOOD, 3 * places, LONG):
                await asyncio.sleep(FLOODED_S)
                first["flooded"] += await caller.first_tokens(QUIET, count)
            async with caller.flood(FLOOD, 3 * places, LONG):
                await asyncio.sleep(FLOODED_S)
                first["one tenant"] += await caller.first_tokens(FLOOD, max(count // 4, 5))
        shares = {
            "equal lengths": await caller.shares(places, seconds, LONG),
            "other lengths": await caller.shares(places, seconds, SHORT),
        }
    told = {name: _spread(times) for name, times in first.items()}
    return {"first_token_ms": told, "shares": shares}


class _Client:
    """Sends requests of tenants."""

    def __init__(self, client: httpx.AsyncClient, server: Server, rng: Random) -> None:
        self._client = client
        self._server = server
        self._rng = rng
        self._texts = [prompt.text for prompt in held_out_prompts()]

    async def first_tokens(self, name: str, count: int) -> list[float]:
        """Seconds to the first tokens of requests, one after the other."""
        times = []
        for _ in range(count):
            await asyncio.sleep(PAUSE_S)
            began = time.perf_counter()
            body = self._body(SHORT) | {"stream": True}
            async with self._client.stream("POST", **self._request(name, body)) as answer:
                assert answer.status_code == 200, await answer.aread()
                lines = answer.aiter_lines()
                await anext(lines)
                times.append(time.perf_counter() - began)
                async for _ in lines:
                    pass
        return times

    @asynccontextmanager
    async def flood(self, name: str, count: int, kind: Kind) -> AsyncIterator[None]:
        """So many requests of a tenant in progress, all the time."""
        tasks = [asyncio.create_task(self._repeat(name, kind)) for _ in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def shares(self, places: int, seconds: float, kind: Kind) -> dict[str, Any]:
        """What two tenants get that flood, the quiet one now with requests of this kind."""
        async with (
            self.flood(FLOOD, 4 * places, LONG),
            self.flood(QUIET, 2 * places, kind),
        ):
            await asyncio.sleep(FLOODED_S)
            before = await self._totals()
            await asyncio.sleep(seconds)
            after = await self._totals()
        got = {
            name: {what: after[what, name] - before[what, name] for what in WORK}
            for name in (QUIET, FLOOD)
        }
        rows = {n: g["steps"] + g["nodes_verified"] for n, g in got.items()}
        prompts = {n: g["prompt_tokens"] - g["cached_tokens"] for n, g in got.items()}
        work = {n: ROW_WEIGHT * rows[n] + PROMPT_WEIGHT * prompts[n] for n in got}
        return {
            "got": got,
            "share_of_rows": _parts(rows),
            "share_of_work": _parts(work),
        }

    async def _repeat(self, name: str, kind: Kind) -> None:
        while True:
            answer = await self._client.post(**self._request(name, self._body(kind)))
            assert answer.status_code == 200, answer.text

    async def _totals(self) -> Mapping[tuple[str, str], float]:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        page = (await self._client.get("/metrics", headers=headers)).text
        found = re.findall(r"^draftline:tenant_(\w+)_total\{.*tenant=\"(\w+)\"\} (\S+)", page, re.M)
        return {(what, name): float(value) for what, name, value in found}

    def _request(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._server.keys[name]}"}
        return {"url": "/v1/completions", "json": body, "headers": headers}

    def _body(self, kind: Kind) -> dict[str, Any]:
        """A prompt that nobody has sent before: pieces of held-out texts."""
        prompt = ""
        while len(prompt) < kind.prompt_letters:
            text = self._rng.choice(self._texts)
            start = self._rng.randrange(max(len(text) - 80, 1))
            prompt += text[start : start + 80]
        return {
            "prompt": prompt[: kind.prompt_letters],
            "max_tokens": kind.tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


WORK = ("requests", "prompt_tokens", "cached_tokens", "steps", "nodes_verified", "nodes_wasted")


def _spread(times: Sequence[float]) -> dict[str, float]:
    named = {"p50": 50, "p90": 90, "p99": 99}
    return {
        "requests": len(times),
        **{name: round(1e3 * float(np.percentile(times, q)), 2) for name, q in named.items()},
    }


def _parts(sums: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value / sum(sums.values()), 4) for name, value in sums.items()}


def _print(found: Mapping[str, Any]) -> None:
    console = Console()
    table = Table("quiet tenant's first token", "requests", "p50 ms", "p90 ms", "p99 ms", box=None)
    for name, spread in found["first_token_ms"].items():
        table.add_row(name, *(f"{spread[key]:g}" for key in ("requests", "p50", "p90", "p99")))
    console.print(table)
    table = Table("both flood", "rows of trees", "whole work", box=None)
    for name, shares in found["shares"].items():
        parts = (shares[what][QUIET] for what in ("share_of_rows", "share_of_work"))
        table.add_row(name, *(f"{part:.1%} and {1 - part:.1%}" for part in parts))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
