"""Prometheus metrics under the names that vLLM's dashboards and planners read.

`vllm:` names mean what they mean there; `draftline:` ones are ours and carry the drafter as
`source`. What is counted a request is taken from finished requests, the rest from the engines when
scraped (`engine_metrics.py`). docs/operations.md, "Metrics", lists them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ....core.fair_share import BoundedNames
from ....core.request.output import Delta, RequestMetrics
from ...engine.stats import EngineStats
from ..engine_client import EngineClient
from .engine_metrics import EngineCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Accepted nodes of a verification step.
DEPTH_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
# Seconds; from one decode step of a small model to a long answer of a large one.
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip


class AnswerRecorder(Protocol):
    """Counts the answers of one model."""

    def record(self, delta: Delta, gap_s: float | None) -> None:
        """Count a delta of an answer; `gap_s`: since the one before it, None for the first."""
        ...


class MetricsPage(Protocol):
    """The page that shows what was counted, and what is counted of a server."""

    def refused(self, tenant: str, reason: str) -> None:
        """Count a request that a tenant's limit refused: which limit, or `unavailable`."""
        ...

    def store_failed(self, store: str) -> None:
        """Count that a store could not be asked: `tenants` or `rate_limit`."""
        ...

    async def text(self, engine_clients: Sequence[EngineClient]) -> bytes:
        """The text that `/metrics` answers; there is one client a model."""
        ...


class AnsweringPage(AnswerRecorder, MetricsPage, Protocol):
    """Both, of one model."""


class ServerMetrics:
    """All metrics of one served model, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._engines = EngineCollector(model_name)
        self._registry.register(self._engines)
        self._model = model_name
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of answers")
        self._tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self._success = self._counter(
            "vllm:request_success", "Requests answered, by how they ended", "finished_reason"
        )
        self._resumed = self._counter(
            "draftline:resumed_requests", "Requests that went on at another replica", "cause"
        )
        self._lost = self._counter(
            "draftline:lost_requests", "Requests whose replica was lost, and that ended", "cause"
        )
        self._routed = self._counter(
            "draftline:routed_requests", "Requests sent to a replica, by why to this one", "reason"
        )
        self._routed_tokens = self._counter(
            "draftline:routed_prompt_tokens", "Tokens of their prompts"
        )
        self._sent_tokens = self._counter(
            "draftline:routed_prefix_tokens", "Of these, those that the replica was sent before"
        )
        self._refused = self._counter(
            "draftline:tenant_refusals", "Requests that a limit refused", "tenant", "reason"
        )
        self._store_failures = self._counter(
            "draftline:tenant_store_failures",
            "Looks at the store of tenants, or of rates, that failed", "store",
        )  # fmt: skip
        self._tenants = BoundedNames()
        self._create_histograms()
        self._create_speculative()

    def _create_histograms(self) -> None:
        self._prompt_len = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS
        )
        self._answer_len = self._histogram(
            "vllm:request_generation_tokens", "Tokens of an answer", TOKEN_BUCKETS
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token"
        )
        self._queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "From arrival to the end of waiting"
        )
        self._prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "From the end of waiting to the first token"
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between the deltas of an answer"
        )
        # Looked up once, since it is used for every delta.
        self._gaps = self._inter_token.labels(self._model)
        self._decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last"
        )
        self._token_time = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a request's tokens behind the first",
        )
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token"
        )

    def _create_speculative(self) -> None:
        prefix = "vllm:spec_decode_num"
        self._steps = self._counter(f"{prefix}_drafts", "Verification steps")
        self._drafted = self._counter(f"{prefix}_draft_tokens", "Nodes verified")
        self._accepted = self._counter(f"{prefix}_accepted_tokens", "Nodes accepted")
        self._accepted_at = self._counter(
            f"{prefix}_accepted_tokens_per_pos", "Nodes accepted, by depth", "position"
        )
        self._accepted_lens = self._histogram(
            "draftline:spec_decode_accepted_length",
            "Nodes accepted in a verification step",
            DEPTH_BUCKETS,
        )
        self._drafted_by = self._counter(
            "draftline:spec_decode_num_draft_tokens", "Nodes verified, by drafter", "source"
        )
        self._accepted_by = self._counter(
            "draftline:spec_decode_num_accepted_tokens", "Nodes accepted, by drafter", "source"
        )

    def record(self, delta: Delta, gap_s: float | None) -> None:
        """Count a delta of an answer; `gap_s`: since the one before it, None for the first."""
        if gap_s is not None:
            self._gaps.observe(gap_s)
        reason = delta.finish_reason
        if reason is not None and reason != "cancelled" and delta.metrics is not None:
            self.record_finish(reason, delta.metrics)

    def record_resumed(self, cause: str) -> None:
        """Count a request that goes on at another replica, by why it had to."""
        self._resumed.labels(self._model, cause).inc()

    def record_lost(self, cause: str) -> None:
        """Count a request that ended with an error, by why it had no replica."""
        self._lost.labels(self._model, cause).inc()

    def record_routed(self, reason: str, num_tokens: int, num_sent_before: int) -> None:
        """Count a request that goes to a replica, which was sent so many of its tokens before."""
        self._routed.labels(self._model, reason).inc()
        self._routed_tokens.labels(self._model).inc(num_tokens)
        self._sent_tokens.labels(self._model).inc(num_sent_before)

    def refused(self, tenant: str, reason: str) -> None:
        """Count a request that a tenant's limit refused: which limit, or `unavailable`."""
        self._refused.labels(self._model, self._tenants.label(tenant), reason).inc()

    def store_failed(self, store: str) -> None:
        """Count that a store could not be asked: `tenants` or `rate_limit`."""
        self._store_failures.labels(self._model, store).inc()

    def record_finish(self, reason: str, metrics: RequestMetrics) -> None:
        """Count a finished request."""
        model = self._model
        self._prompt_tokens.labels(model).inc(metrics.prompt_tokens)
        self._tokens.labels(model).inc(metrics.generated_tokens)
        self._success.labels(model, reason).inc()
        self._prompt_len.labels(model).observe(metrics.prompt_tokens)
        self._answer_len.labels(model).observe(metrics.generated_tokens)
        self._queue_time.labels(model).observe(metrics.start_time - metrics.arrival_time)
        self._prefill_time.labels(model).observe(metrics.first_token_time - metrics.start_time)
        self._first_token.labels(model).observe(metrics.first_token_time - metrics.arrival_time)
        self._decode_time.labels(model).observe(metrics.finish_time - metrics.first_token_time)
        self._latency.labels(model).observe(metrics.finish_time - metrics.arrival_time)
        if metrics.generated_tokens > 1:
            decode_s = metrics.finish_time - metrics.first_token_time
            self._token_time.labels(model).observe(decode_s / (metrics.generated_tokens - 1))
        self._record_speculative(metrics)

    def _record_speculative(self, metrics: RequestMetrics) -> None:
        model = self._model
        self._steps.labels(model).inc(metrics.num_steps)
        self._drafted.labels(model).inc(metrics.num_draft_tokens)
        self._accepted.labels(model).inc(metrics.num_accepted_tokens)
        lengths = self._accepted_lens.labels(model)
        for accepted_len in metrics.accepted_lengths:
            lengths.observe(accepted_len)
            for position in range(accepted_len):
                self._accepted_at.labels(model, str(position)).inc()
        for source, count in metrics.drafted_by_source.items():
            self._drafted_by.labels(model, source).inc(count)
        for source, count in metrics.accepted_by_source.items():
            self._accepted_by.labels(model, source).inc(count)

    async def text(self, engine_clients: Sequence[EngineClient]) -> bytes:
        """The text that `/metrics` answers, of one model."""
        [engine_client] = engine_clients
        return self.render(await engine_client.stats())

    def render(self, stats: Sequence[EngineStats]) -> bytes:
        """That text; `stats` has one entry an engine replica."""
        self.take(stats)
        return generate_latest(self._registry)

    def take(self, stats: Sequence[EngineStats]) -> None:
        """Show these engines from now on."""
        self._engines.stats = stats

    def collect(self) -> Iterable[Metric]:
        """All families."""
        return self._registry.collect()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("model_name", *labels), registry=self._registry)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        return Histogram(name, text, ("model_name",), registry=self._registry, buckets=buckets)


class JointMetrics(Collector):
    """The page of several models. A request that is refused before its body is read is of none, and
    counts with an empty `model_name`.

    by_model  in the order of the engine clients
    """

    def __init__(self, by_model: Sequence[ServerMetrics]) -> None:
        self._by_model = by_model
        self._of_none = ServerMetrics("")

    def refused(self, tenant: str, reason: str) -> None:
        """Count a request that a tenant's limit refused: which limit, or `unavailable`."""
        self._of_none.refused(tenant, reason)

    def store_failed(self, store: str) -> None:
        """Count that a store could not be asked: `tenants` or `rate_limit`."""
        self._of_none.store_failed(store)

    async def text(self, engine_clients: Sequence[EngineClient]) -> bytes:
        """The text that `/metrics` answers."""
        all_stats = await asyncio.gather(*(client.stats() for client in engine_clients))
        for metrics, stats in zip(self._by_model, all_stats, strict=True):
            metrics.take(stats)
        joint = CollectorRegistry()
        joint.register(self)
        return generate_latest(joint)

    def collect(self) -> Iterable[Metric]:
        """All families, each once with the samples of all models."""
        families: dict[str, Metric] = {}
        for metrics in (*self._by_model, self._of_none):
            for family in metrics.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return families.values()
