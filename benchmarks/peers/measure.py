"""Measures one server, or transformers in this process, on the same prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ...core.errors import ConfigError
from ...measure.clients.http_endpoint import HttpEndpoint
from ...measure.clients.load import Load, run_load
from ...measure.clients.setting import Setting
from ...measure.records.record import Record
from ...measure.records.run_metrics import RunMetrics, run_metrics
from ...measure.records.spec_counts import total
from ...measure.runs.matched import Plan
from .transformers_peer import TransformersPeer

# Prompts of the warm-up.
WARM_UP = 2
# Whatever the server does by itself.
SERVED = Setting("served", None)


@dataclass(frozen=True, slots=True)
class Plans:
    """What every server is asked: no prompt twice, since some remember what they answered."""

    warm_up: Plan
    by_streams: dict[int, Plan]


def make_plans(plan: Plan, streams: Sequence[int], least: int) -> Plans:
    """Deal the prompts of `plan` out: to a warm-up, and to each number of streams.

    Each gets one for every stream and at least `least`. Raises `ConfigError` if there are too few.
    """
    sizes = [WARM_UP, *(max(least, count) for count in streams)]
    if sum(sizes) > len(plan.prompts):
        raise ConfigError(
            "prompts",
            f"{sum(sizes)} different ones are needed for {streams} streams, there are "
            f"{len(plan.prompts)}; give a longer file, fewer streams or a lower --num-prompts",
        )
    ends = list(accumulate(sizes))
    parts = [
        replace(plan, prompts=plan.prompts[end - size : end])
        for size, end in zip(sizes, ends, strict=True)
    ]
    return Plans(parts[0], dict(zip(streams, parts[1:], strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One round of one server at one number of streams; `texts` are the answers."""

    metrics: RunMetrics
    tau: float
    texts: tuple[str, ...]


def measure_server(url: str, plans: Plans) -> dict[int, Measured]:
    """What a healthy server does at each number of streams, after a warm-up."""
    return asyncio.run(_measure(url, plans))


async def _measure(url: str, plans: Plans) -> dict[int, Measured]:
    found = {}
    # Reports of sources would be work that other servers do not do.
    async with HttpEndpoint(url, report=False) as endpoint:
        await endpoint.connect()
        warm_up = plans.warm_up.asks(SERVED, "warm-up")
        await run_load(endpoint, warm_up, Load(concurrency=len(warm_up)))
        for count, plan in plans.by_streams.items():
            asks = plan.asks(SERVED, f"{count} streams")
            records, seconds = await run_load(endpoint, asks, Load(concurrency=count))
            found[count] = Measured(
                metrics=run_metrics(records, seconds),
                tau=tau(records),
                texts=tuple(record.text for record in records),
            )
    return found


def tau(records: Sequence[Record]) -> float:
    """Tokens a pass of the target, without the prompts' passes.

    As the server counts them; else tokens a part of the stream, which is a pass unless the server
    joined several: vLLM's counter of accepted tokens holds those that `max_tokens` cut off.
    """
    counts = [record.counts for record in records if record.counts is not None]
    if len(counts) == len(records):
        return total(counts).tau
    tokens = sum(record.num_tokens - 1 for record in records)
    return tokens / max(1, sum(len(record.arrivals) - 1 for record in records))


@dataclass(frozen=True, slots=True)
class InProcess:
    """transformers' `generate` on all prompts, `batch` at a time."""

    rate: float
    tau: float
    texts: tuple[tuple[int, ...], ...]


def measure_transformers(
    peer: TransformersPeer, plan: Plan, options: Mapping[str, Any], batch: int = 1
) -> InProcess:
    """One round; `options` go to `generate`."""
    prompts = [peer.encode(prompt.text) for prompt in plan.prompts]
    start = time.perf_counter()
    outputs = [
        output
        for group in batched(prompts, batch)
        for output in peer.generate_batch(group, plan.max_tokens, options)
    ]
    seconds = time.perf_counter() - start
    tokens = sum(len(output.token_ids) for output in outputs)
    return InProcess(
        tokens / seconds,
        (tokens - len(outputs)) / sum(output.passes - 1 for output in outputs),
        tuple(output.token_ids for output in outputs),
    )


def batched(prompts: Sequence[list[int]], size: int) -> Iterator[Sequence[list[int]]]:
    """Prompts in their order, `size` at a time."""
    for first in range(0, len(prompts), size):
        yield prompts[first : first + size]
