"""Measures one server, or transformers in this process, on the same prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ...bench.http_endpoint import HttpEndpoint
from ...bench.load import Load, run_load
from ...bench.matched import Plan
from ...bench.run_metrics import RunMetrics, run_metrics
from ...bench.setting import Setting
from ..transformers_peer import TransformersPeer

# Whatever the server does by itself.
SERVED = Setting("served", None)
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One round of one server at one number of streams; `texts` are the answers."""

    metrics: RunMetrics
    tau: float
    texts: tuple[str, ...]


def measure_server(url: str, plan: Plan, streams: Sequence[int]) -> dict[int, Measured]:
    """What a healthy server does at each number of streams, after a warm-up at the largest."""
    return asyncio.run(_measure(url, plan, streams))


async def _measure(url: str, plan: Plan, streams: Sequence[int]) -> dict[int, Measured]:
    found = {}
    # Reports of sources would be work that other servers do not do.
    async with HttpEndpoint(url, report=False) as endpoint:
        await endpoint.connect()
        await run_load(endpoint, plan.asks(SERVED, "warm-up"), Load(concurrency=max(streams)))
        for count in streams:
            before = _accepted(url)
            asks = plan.asks(SERVED, f"{count} streams")
            records, seconds = await run_load(endpoint, asks, Load(concurrency=count))
            metrics = run_metrics(records, seconds)
            found[count] = Measured(
                metrics=metrics,
                tau=tau(metrics.num_tokens, metrics.num_requests, _accepted(url) - before),
                texts=tuple(record.text for record in records),
            )
    return found


def tau(num_tokens: int, num_requests: int, num_accepted: float) -> float:
    """Tokens a pass of the target.

    The prompt's pass brings a token; every other one the nodes that it accepts and one more.
    """
    decoded = num_tokens - num_requests
    return decoded / (decoded - num_accepted) if decoded else 1.0


def _accepted(url: str) -> float:
    """Drafted tokens that the server has accepted so far; both kinds of server count them."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    families = text_string_to_metric_families(text)
    samples = (sample for family in families for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == ACCEPTED)


@dataclass(frozen=True, slots=True)
class InProcess:
    """transformers' `generate` on all prompts, one after another."""

    rate: float
    tau: float
    texts: tuple[tuple[int, ...], ...]


def measure_transformers(
    peer: TransformersPeer, plan: Plan, options: Mapping[str, Any]
) -> InProcess:
    """One round; `options` go to `generate`."""
    prompts = [peer.encode(prompt.text) for prompt in plan.prompts]
    start = time.perf_counter()
    outputs = [peer.generate(prompt, plan.max_tokens, options) for prompt in prompts]
    seconds = time.perf_counter() - start
    tokens = sum(len(output.token_ids) for output in outputs)
    return InProcess(
        tokens / seconds,
        tokens / sum(output.passes for output in outputs),
        tuple(output.token_ids for output in outputs),
    )
