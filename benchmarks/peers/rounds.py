"""Rounds of all servers, kept after every turn."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from rich.console import Console

from ...core.errors import DraftlineError
from ...measure.clients.endpoint import Ask, Load, Setting, run_load
from ...measure.clients.http_endpoint import HttpEndpoint
from ...measure.prompts import BenchPrompt
from ...measure.records import Record, run_metrics, total
from ...measure.runs.matched import Plan
from .plan import WARM_UP, PeerCell, Start, estimated_seconds
from .report import Comparison, PeerRun, family
from .servers import RunningServer, ServerSpec, cpu_seconds, running
from .target import Target
from .transformers_peer import TransformersPeer

# Whatever the server does by itself.
SERVED = Setting("served", None)
DIGEST_LEN = 6


@dataclass(frozen=True, slots=True)
class Asked:
    """How all servers are asked.

    tokens     most of an answer; chats end where they end, else answers go on to it
    is_seeded  whether requests have seeds
    """

    target: Target
    tokens: int
    temperature: float = 0.0
    is_seeded: bool = True

    def asks(self, prompts: Sequence[BenchPrompt], salt: str) -> list[Ask]:
        """One request for each prompt."""
        plan = Plan(
            prompts=prompts,
            max_tokens=self.tokens,
            temperature=self.temperature,
            is_chat=self.target.is_chat,
            ignore_eos=not self.target.is_chat,
        )
        asks = plan.asks(SERVED, salt)
        return asks if self.is_seeded else [replace(ask, seed=None) for ask in asks]


def measure_server(
    server: RunningServer, name: str, start: Start, asked: Asked, turn: int
) -> list[PeerRun]:
    """What a healthy server does in each cell, after a warm-up. Raises `DraftlineError`."""
    asyncio.run(_load(server, asked.asks(start.warm_up, "warm-up"), WARM_UP))
    found = []
    for cell in start.cells:
        asks = asked.asks(cell.prompts, f"{cell.label} {cell.streams}")
        begin = cpu_seconds(server.pid)
        records, seconds = asyncio.run(_load(server, asks, cell.streams))
        end = cpu_seconds(server.pid)
        cpu_s = None if begin is None or end is None else end - begin
        found.append(_run(cell, turn, name, Answered(records, seconds, cpu_s)))
    return found


async def _load(
    server: RunningServer, asks: Sequence[Ask], streams: int
) -> tuple[list[Record], float]:
    """Records and seconds; every request has a connection of its own.

    llama.cpp's server closes connections without a word, and a request that is sent over one at
    that moment is lost.
    """
    client = httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0))
    # Reports of sources would be work that other servers do not do.
    async with HttpEndpoint(server.url, report=False, http_client=client) as endpoint:
        await endpoint.connect()
        return await run_load(endpoint, asks, Load(concurrency=streams))


@dataclass(frozen=True, slots=True)
class Answered:
    """A cell's records, the seconds that they took, and the server's processor seconds."""

    records: Sequence[Record]
    seconds: float
    cpu_s: float | None


def _run(cell: PeerCell, turn: int, name: str, answered: Answered) -> PeerRun:
    metrics = run_metrics(answered.records, answered.seconds)
    return PeerRun(
        round=turn,
        prompts=cell.label,
        streams=cell.streams,
        server=name,
        num_requests=metrics.num_requests,
        num_tokens=metrics.num_tokens,
        seconds=metrics.seconds,
        ttft=metrics.ttft,
        tpot=metrics.tpot,
        itl=metrics.itl,
        cpu_s=answered.cpu_s,
        tau=tau(answered.records),
        answers=digests(record.text for record in answered.records),
    )


def digests(texts: Iterable[str]) -> tuple[str, ...]:
    """A few hexadecimal digits of each: enough to tell two answers to one prompt apart."""
    return tuple(hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LEN] for text in texts)


def tau(records: Sequence[Record]) -> float:
    """Tokens a pass of the target, without the prompts' passes.

    As the server counts them; else tokens a part of the stream, which is a pass unless the server
    joined several: vLLM's counter of accepted tokens holds those that `max_tokens` cut off.
    """
    counts = [record.counts for record in records if record.counts is not None]
    if len(counts) == len(records):
        return total(counts).tau
    tokens = sum(record.num_tokens - 1 for record in records)
    parts = [
        record.counts.num_steps if record.counts else len(record.arrivals) - 1 for record in records
    ]
    return tokens / max(1, sum(parts))


def measure_transformers(
    peer: TransformersPeer, cell: PeerCell, asked: Asked, turn: int, name: str
) -> PeerRun:
    """One round of plain `generate` on a cell's prompts, as many at a time as it has streams."""
    target = asked.target
    prompts = [target.prompt_ids(prompt.text) for prompt in cell.prompts]
    options = (
        {"do_sample": True, "temperature": asked.temperature, "top_k": 0}
        if asked.temperature
        else {}
    )
    begin, start = time.process_time(), time.perf_counter()
    outputs = [
        output
        for group in batched(prompts, cell.streams)
        for output in peer.generate_batch(group, asked.tokens, options)
    ]
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - begin
    num_tokens = sum(len(output.token_ids) for output in outputs)
    return PeerRun(
        round=turn,
        prompts=cell.label,
        streams=cell.streams,
        server=name,
        num_requests=len(prompts),
        num_tokens=num_tokens,
        seconds=seconds,
        ttft=None,
        tpot=None,
        itl=None,
        cpu_s=cpu_s,
        # Plain decoding; rows that wait for the longest of their group are not its.
        tau=1.0,
        answers=digests(target.decode(list(output.token_ids)) for output in outputs),
    )


def batched(prompts: Sequence[list[int]], size: int) -> Iterator[Sequence[list[int]]]:
    """Prompts in their order, `size` at a time."""
    for first in range(0, len(prompts), size):
        yield prompts[first : first + size]


TRANSFORMERS = "transformers, plain"
# It has no server of its own to take more at once.
TRANSFORMERS_BATCHES = (1, 8)


@dataclass(frozen=True, slots=True)
class Turn:
    """One start of one server in one round; a start's number tells servers' logs apart."""

    round: int
    server: str
    start: Start
    spec: ServerSpec | None

    @property
    def cells(self) -> list[tuple[str, int]]:
        """Prompts and streams of what it measures."""
        return [(cell.label, cell.streams) for cell in self.start.cells]


def make_turns(
    rounds: Sequence[Sequence[Start]], specs: Sequence[ServerSpec], *, transformers: bool
) -> list[Turn]:
    """All servers take turns behind each start, and each round begins with another one.

    So what is compared is measured within minutes. transformers runs once, first of all: nothing
    but the versions of two libraries can change it.
    """
    turns = []
    if transformers:
        turns += [Turn(0, TRANSFORMERS, start, None) for start in _in_process(rounds[0])]
    for number, starts in enumerate(rounds if specs else ()):
        first = number % len(specs)
        for start in starts:
            turns += [
                Turn(number, spec.name, start, spec) for spec in [*specs[first:], *specs[:first]]
            ]
    return turns


def _in_process(starts: Sequence[Start]) -> list[Start]:
    found = []
    for start in starts:
        cells = tuple(cell for cell in start.cells if cell.streams in TRANSFORMERS_BATCHES)
        if cells:
            found.append(Start((), cells))
    return found


def estimate(turns: Sequence[Turn], asked: Asked) -> float:
    """Seconds that the turns take, or about so many."""
    seconds = asked.target.seconds_a_pass
    return sum(
        estimated_seconds(turn.start, family(turn.server), asked.tokens, seconds) for turn in turns
    )


def run_turns(
    comparison: Comparison,
    turns: Sequence[Turn],
    asked: Asked,
    keep: Callable[[], None],
    logs: Path,
    console: Console,
) -> list[str]:
    """Measure what `comparison` does not hold yet, and `keep` it after every turn.

    Returns what was left out because its server failed.
    """
    left = [turn for turn in turns if not comparison.has(turn.round, turn.server, turn.cells)]
    failed, begin, expected = [], time.monotonic(), estimate(left, asked)
    for place, turn in enumerate(left):
        rest = estimate(left[place:], asked)
        spent = time.monotonic() - begin
        # What is done tells how far off the estimate is here.
        scale = spent / (expected - rest) if place else 1.0
        console.print(
            f"round {turn.round + 1}: {turn.server} ({place + 1} of {len(left)}; about "
            f"{scale * rest / 60:.0f} minutes left)"
        )
        try:
            found = _measure(turn, asked, logs)
        except DraftlineError as error:
            console.print(f"LEFT OUT in this round: {error}", style="bold red")
            failed.append(f"round {turn.round + 1}: {turn.server}: {error}")
            continue
        comparison.runs += found
        keep()
    return failed


def _measure(turn: Turn, asked: Asked, logs: Path) -> list[PeerRun]:
    if turn.spec is None:
        peer = TransformersPeer(asked.target.name, ends=asked.target.is_chat)
        return [
            measure_transformers(peer, cell, asked, turn.round, turn.server)
            for cell in turn.start.cells
        ]
    asked = replace(asked, is_seeded=turn.spec.is_seeded)
    with running(turn.spec, logs) as server:
        return measure_server(server, turn.server, turn.start, asked, turn.round)
