"""Prometheus metrics under the names that vLLM's dashboards and planners read.

`vllm:` names mean what they mean there; `draftline:` ones are ours and carry the drafter as
`source`. Request counters are taken from finished requests, gauges from the engines when scraped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..core.output import RequestMetrics

if TYPE_CHECKING:
    from .engine import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds; from one decode step of a small model to a long answer of a large one.
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip


class ServerMetrics:
    """All metrics of one served model, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of answers")
        self._tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self._success = self._counter(
            "vllm:request_success", "Requests answered, by how they ended", "finished_reason"
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token"
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between the deltas of an answer"
        )
        self._decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last"
        )
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token"
        )
        self._create_speculative()
        self._create_gauges()

    def _create_speculative(self) -> None:
        prefix = "vllm:spec_decode_num"
        self._steps = self._counter(f"{prefix}_drafts", "Verification steps")
        self._drafted = self._counter(f"{prefix}_draft_tokens", "Nodes verified")
        self._accepted = self._counter(f"{prefix}_accepted_tokens", "Nodes accepted")
        self._accepted_at = self._counter(
            f"{prefix}_accepted_tokens_per_pos", "Nodes accepted, by depth", "position"
        )
        self._drafted_by = self._counter(
            "draftline:spec_decode_num_draft_tokens", "Nodes verified, by drafter", "source"
        )
        self._accepted_by = self._counter(
            "draftline:spec_decode_num_accepted_tokens", "Nodes accepted, by drafter", "source"
        )

    def _create_gauges(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Requests being computed")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests in the queue")
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "KV cache in use; 1 is full")

    def record_gap(self, seconds: float) -> None:
        """Time between two deltas of an answer."""
        self._inter_token.labels(self._model).observe(seconds)

    def record_finish(self, reason: str, metrics: RequestMetrics) -> None:
        """Count a finished request."""
        model = self._model
        self._prompt_tokens.labels(model).inc(metrics.prompt_tokens)
        self._tokens.labels(model).inc(metrics.generated_tokens)
        self._success.labels(model, reason).inc()
        self._first_token.labels(model).observe(metrics.first_token_time - metrics.arrival_time)
        self._decode_time.labels(model).observe(metrics.finish_time - metrics.first_token_time)
        self._latency.labels(model).observe(metrics.finish_time - metrics.arrival_time)
        self._record_speculative(metrics)

    def _record_speculative(self, metrics: RequestMetrics) -> None:
        model = self._model
        self._steps.labels(model).inc(metrics.num_steps)
        self._drafted.labels(model).inc(metrics.num_draft_tokens)
        self._accepted.labels(model).inc(metrics.num_accepted_tokens)
        for accepted_len in metrics.accepted_lengths:
            for position in range(accepted_len):
                self._accepted_at.labels(model, str(position)).inc()
        for source, count in metrics.drafted_by_source.items():
            self._drafted_by.labels(model, source).inc(count)
        for source, count in metrics.accepted_by_source.items():
            self._accepted_by.labels(model, source).inc(count)

    def render(self, stats: Sequence[EngineStats]) -> bytes:
        """The text that `/metrics` answers; `stats` has one entry an engine replica."""
        for gauge in (self._running, self._waiting, self._kv_usage):
            # A replica that is gone must not leave its last value behind.
            gauge.clear()
        for index, engine in enumerate(stats):
            labels = (self._model, str(index))
            self._running.labels(*labels).set(engine.num_running)
            self._waiting.labels(*labels).set(engine.num_waiting)
            self._kv_usage.labels(*labels).set(engine.kv_usage)
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("model_name", *labels), registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            name, text, ("model_name",), registry=self._registry, buckets=LATENCY_BUCKETS
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model_name", "engine"), registry=self._registry)
