"""Measures one server, or transformers in this process, on the same prompts."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import httpx

from ...core.errors import DraftlineError
from ...measure.clients.endpoint import Ask
from ...measure.clients.http_endpoint import HttpEndpoint
from ...measure.clients.load import Load, run_load
from ...measure.clients.setting import Setting
from ...measure.records.record import Record
from ...measure.records.run_metrics import run_metrics
from ...measure.records.spec_counts import total
from ...measure.runs.matched import Plan
from .cpu_time import cpu_seconds
from .plan import WARM_UP, Cell, Start
from .report.runs import PeerRun
from .running import RunningServer
from .transformers_peer import TransformersPeer

# Whatever the server does by itself.
SERVED = Setting("served", None)
DIGEST_LEN = 6


def measure_server(
    server: RunningServer, name: str, start: Start, tokens: int, turn: int
) -> list[PeerRun]:
    """What a healthy server does in each cell, after a warm-up. Raises `DraftlineError`."""
    plan = Plan(prompts=start.warm_up, max_tokens=tokens)
    asyncio.run(_load(server, plan.asks(SERVED, "warm-up"), WARM_UP))
    found = []
    for cell in start.cells:
        asks = replace(plan, prompts=cell.prompts).asks(SERVED, f"{cell.label} {cell.streams}")
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


def _run(cell: Cell, turn: int, name: str, answered: Answered) -> PeerRun:
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
    peer: TransformersPeer, cell: Cell, tokens: int, turn: int, name: str
) -> PeerRun:
    """One round of plain `generate` on a cell's prompts, as many at a time as it has streams.

    Raises `DraftlineError` where an answer is short.
    """
    prompts = [peer.encode(prompt.text) for prompt in cell.prompts]
    begin, start = time.process_time(), time.perf_counter()
    outputs = [
        output
        for group in batched(prompts, cell.streams)
        for output in peer.generate_batch(group, tokens, {})
    ]
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - begin
    num_tokens = sum(len(output.token_ids) for output in outputs)
    if num_tokens != tokens * len(prompts):
        raise DraftlineError(f"transformers answered with {num_tokens} tokens")
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
        tau=(num_tokens - len(outputs)) / sum(output.passes - 1 for output in outputs),
        answers=digests(peer.decode(output.token_ids) for output in outputs),
    )


def batched(prompts: Sequence[list[int]], size: int) -> Iterator[Sequence[list[int]]]:
    """Prompts in their order, `size` at a time."""
    for first in range(0, len(prompts), size):
        yield prompts[first : first + size]
