"""The engine beside HTTP in one process, and in a process of its own: speed, first tokens, CPU.

    python -m draftline.benchmarks.serving.api_processes [--streams 1,8,32] [--rounds 3]

Serves the demo model once for every number of API processes (0: all in one process), all at the
same time, and loads one after the other: greedy streams of held-out prompts. A steady stream beside
the worst permitted prompts tells what they cost others. The client is this process, on the same
cores. Prints medians over rounds; writes JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...measure.records.record import machine

RESULTS = Path(__file__).parents[1] / "results" / "api_processes.json"
COMMAND = (sys.executable, "-c", "from draftline.deploy.cli.main import main; main()")
DRAFTERS = {"none": "[]", "lookup": '[{"kind": "suffix"}, {"kind": "prompt_lookup"}]'}
# Tokens a second; first token, 99th percentile of gaps, CPU a token of all and of the engine, s.
Figures = tuple[float, float, float, float, float]
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One load of one server; medians over rounds but for `rates`.

    rates     tokens a second of all streams together, one a round
    first_ms  from a request to its first token, median over streams
    gap_ms    between two events of a stream, 99th percentile
    cpu_ms    processor time of the server's processes a token; `engine_cpu_ms`: of its first one
    """

    api_processes: int
    drafters: str
    streams: int
    rates: tuple[float, ...]
    first_ms: float
    gap_ms: float
    cpu_ms: float
    engine_cpu_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRow:
    """A steady stream beside a heavy request: its longest gap, median over rounds and largest."""

    api_processes: int
    request: str
    seconds: float
    median_gap_ms: float
    longest_gap_ms: float


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its number of API processes, port and process."""

    api_processes: int
    port: int
    pid: int

    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds of all its processes, and of the first."""
        first = _cpu_s(self.pid)
        return first + sum(map(_cpu_s, _children(self.pid))), first


@dataclass(frozen=True, slots=True)
class Heard:
    """When a stream was asked for and when each event came, seconds."""

    asked: float
    came: list[float]

    @property
    def gaps(self) -> list[float]:
        """Between events, seconds."""
        return [after - before for before, after in zip(self.came, self.came[1:], strict=False)]


def main(
    *,
    streams: Annotated[str, typer.Option(help="Streams at once.")] = "1,8,32",
    processes: Annotated[str, typer.Option(help="Numbers of API processes; 0: in one.")] = "0,1,2",
    drafters: Annotated[str, typer.Option(help="none, lookup or both.")] = "none,lookup",
    tokens: Annotated[int, typer.Option(help="New tokens of each stream.")] = 128,
    rounds: Annotated[int, typer.Option(help="Times that every load runs.")] = 3,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Compare the ways to serve, at several loads."""
    counts = [int(count) for count in streams.split(",")]
    numbers = [int(number) for number in processes.split(",")]
    rows: list[Row] = []
    stalls: list[StallRow] = []
    for name in drafters.split(","):
        with ExitStack() as stack:
            servers = [stack.enter_context(served(number, name, max(counts))) for number in numbers]
            for count in counts:
                rows += asyncio.run(measure(servers, name, count, tokens, rounds))
            if name == "none":
                stalls += asyncio.run(measure_stalls(servers, rounds))
    _print(rows, stalls)
    content = {
        "machine": machine().fields(),
        "tokens": tokens,
        "rows": [asdict(row) for row in rows],
        "stalls": [asdict(row) for row in stalls],
    }
    output.write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def served(api_processes: int, drafters: str, most: int) -> Iterator[Server]:
    """`draftline serve` at a free port."""
    arguments = ["demo", "--port", "0", "--api-processes", str(api_processes)]
    arguments += ["--max-num-seqs", str(most), "--kv-cache-tokens", str(most * 512)]
    arguments += ["--no-enable-prefix-caching", "--speculative-config", DRAFTERS[drafters]]
    with subprocess.Popen(
        [*COMMAND, "serve", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        try:
            lines = list(takewhile(lambda line: not line.startswith("curl "), process.stdout))
            found = re.search(r"ready: http://\S+:(\d+)/v1", lines[-1])
            assert found, lines
            yield Server(api_processes, int(found[1]), process.pid)
        finally:
            process.terminate()


async def measure(
    servers: Sequence[Server], drafters: str, count: int, tokens: int, rounds: int
) -> list[Row]:
    """One load of every server, in turn."""
    found: dict[int, list[Figures]] = {}
    for turn in range(rounds + 1):
        for server in servers:
            figures = await _load(server, count, tokens)
            # The first turn compiles, and teaches the budget.
            if turn:
                found.setdefault(server.api_processes, []).append(figures)
    rows = []
    for number, turns in found.items():
        rates, *others = zip(*turns, strict=True)
        first, gap, cpu, engine_cpu = (round(1e3 * statistics.median(x), 3) for x in others)
        rows.append(
            Row(
                api_processes=number,
                drafters=drafters,
                streams=count,
                rates=tuple(round(rate, 1) for rate in rates),
                first_ms=first,
                gap_ms=gap,
                cpu_ms=cpu,
                engine_cpu_ms=engine_cpu,
            )
        )
    return rows


async def _load(server: Server, count: int, tokens: int) -> Figures:
    """Tokens a second; first token, 99th percentile of gaps, CPU a token: all and engine, s."""
    prompts = islice(cycle(prompt.text for prompt in held_out_prompts(66)), count)
    bodies = [
        {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        for prompt in prompts
    ]
    before, began = server.cpu_s(), time.perf_counter()
    heard = await asyncio.gather(*(_stream(server.port, body) for body in bodies))
    seconds, after = time.perf_counter() - began, server.cpu_s()
    total = count * tokens
    gaps = sorted(gap for one in heard for gap in one.gaps)
    first = statistics.median(one.came[0] - one.asked for one in heard)
    cpu, engine_cpu = ((b - a) / total for a, b in zip(before, after, strict=True))
    return total / seconds, first, gaps[int(len(gaps) * 0.99)], cpu, engine_cpu


async def _stream(port: int, body: dict[str, object]) -> Heard:
    """Ask for a stream and hear it to its end, as cheaply as a client can."""
    data = json.dumps({"model": "demo", "stream": True, **body}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    asked = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    came: list[float] = []
    last = b""
    while b"[DONE]" not in last:
        part = await reader.read(65536)
        if not part:
            raise ConnectionError(last.decode(errors="replace"))
        if b"data: " in part:
            came.append(time.perf_counter())
        last = last[-16:] + part
    writer.close()
    return Heard(asked, came)


async def measure_stalls(servers: Sequence[Server], rounds: int) -> list[StallRow]:
    """What a stream feels of heavy requests, in turn."""
    line = "def add(left, right):\n    return left + right\n\n\n"
    ids = [1 + index % 99 for index in range(511)]
    heavy: dict[str, dict[str, object]] = {
        "none": {"prompt": "a", "max_tokens": 1},
        "a prompt of 10^6 characters": {"prompt": (line * 25_000)[:1_000_000], "max_tokens": 1},
        "400 prompts of 511 ids, refused": {"prompt": [ids] * 400, "max_tokens": 1},
        "tokens with 20 log-probabilities": {
            "prompt": line, "n": 16, "max_tokens": 64, "logprobs": 20, "ignore_eos": True,
        },
    }  # fmt: skip
    rows = []
    for name, body in heavy.items():
        found: dict[int, list[tuple[float, float]]] = {}
        for _ in range(rounds):
            for server in servers:
                found.setdefault(server.api_processes, []).append(await _stall(server, body))
        for number, turns in found.items():
            seconds, gaps = zip(*turns, strict=True)
            row = StallRow(
                api_processes=number,
                request=name,
                seconds=round(statistics.median(seconds), 2),
                median_gap_ms=round(1e3 * statistics.median(gaps), 1),
                longest_gap_ms=round(1e3 * max(gaps), 1),
            )
            rows.append(row)
    return rows


async def _stall(server: Server, body: dict[str, object]) -> tuple[float, float]:
    """Seconds of a heavy request, and the longest gap of a stream that it began beside."""
    steady = {"prompt": "def f", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    stream = asyncio.create_task(_stream(server.port, steady))
    await asyncio.sleep(0.3)
    began = time.perf_counter()
    # In a process of its own: this one is to hear the stream.
    script = (
        "import sys,http.client;c=http.client.HTTPConnection('127.0.0.1',int(sys.argv[1]));"
        "c.request('POST','/v1/completions',sys.stdin.buffer.read(),"
        "{'Content-Type':'application/json'});c.getresponse().read()"
    )
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(server.port), stdin=asyncio.subprocess.PIPE
    )
    await client.communicate(json.dumps({"model": "demo", **body}).encode())
    seconds = time.perf_counter() - began
    heard = await stream
    return seconds, max(heard.gaps)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def _children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for one in lists for child in one.read_text().split()]


def _print(rows: list[Row], stalls: list[StallRow]) -> None:
    console = Console(width=120)
    columns = ("first ms", "gap p99 ms", "CPU ms a token", "engine's")
    table = Table("drafters", "streams", "API processes", "tokens/s", *columns)
    for row in rows:
        figures = (row.first_ms, row.gap_ms, row.cpu_ms, row.engine_cpu_ms)
        name = f"{row.api_processes}" if row.api_processes else "0 (in one process)"
        rate = f"{statistics.median(row.rates):.0f}"
        table.add_row(row.drafters, str(row.streams), name, rate, *(f"{x:.2f}" for x in figures))
    console.print(table)
    table = Table("beside a stream", "API processes", "seconds", "longest gap ms", "of all rounds")
    for stall in stalls:
        gaps = (f"{stall.median_gap_ms:.0f}", f"{stall.longest_gap_ms:.0f}")
        table.add_row(stall.request, str(stall.api_processes), f"{stall.seconds:.2f}", *gaps)
    console.print(table)
    console.print(machine().line())


if __name__ == "__main__":
    typer.run(main)
