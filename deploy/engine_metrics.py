"""Metrics that come from the engines when they are scraped: gauges, and totals as counters.

A total goes back to 0 with its engine. Prometheus takes that for a counter's reset; a replica that
Ray Serve replaces has another `engine` label, so no series ever mixes two engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from ..cluster.drafter_stats import DrafterStats
from .engine_stats import EngineStats

MetricT = TypeVar("MetricT", GaugeMetricFamily, CounterMetricFamily)


class EngineCollector(Collector):
    """Makes the metrics of `stats`, which has one entry an engine that answered in time."""

    def __init__(self, model_name: str) -> None:
        self.stats: Sequence[EngineStats] = ()
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        """All families, those without samples too."""
        yield from self._engine_gauges()
        yield from self._engine_counters()
        yield from self._drafter_gauges()
        yield from self._drafter_counters()
        yield self._drafter_latency()

    def _engine_gauges(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily
        yield self._of_engines(
            gauge, "vllm:num_requests_running", "Requests being computed", lambda e: e.num_running
        )
        yield self._of_engines(
            gauge, "vllm:num_requests_waiting", "Requests in the queue", lambda e: e.num_waiting
        )
        yield self._of_engines(
            gauge, "vllm:kv_cache_usage_perc", "KV cache in use; 1 is full", lambda e: e.kv_usage
        )

    def _engine_counters(self) -> Iterator[Metric]:
        counter = CounterMetricFamily
        yield self._of_engines(
            counter, "draftline:engine_steps", "Steps submitted", lambda e: e.num_steps
        )
        yield self._of_engines(
            counter,
            "vllm:num_preemptions",
            "Requests that gave up their KV",
            lambda e: e.num_preemptions,
        )
        yield self._of_engines(
            counter,
            "vllm:prefix_cache_queries",
            "Prompt tokens looked for in the prefix cache",
            lambda e: e.num_prefix_queries,
        )
        yield self._of_engines(
            counter,
            "vllm:prefix_cache_hits",
            "Prompt tokens found in the prefix cache",
            lambda e: e.num_prefix_hits,
        )
        wasted = CounterMetricFamily(
            "draftline:spec_decode_num_wasted_tokens",
            "Nodes verified and thrown away, by drafter",
            labels=("model_name", "engine", "source"),
        )
        for engine in self.stats:
            for source, count in engine.wasted_by_source.items():
                wasted.add_metric((self._model, engine.engine_id, source), count)
        yield wasted

    def _drafter_gauges(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily
        yield self._of_drafters(
            gauge, "draftline:drafter_up", "1: connected", lambda d: d.connected
        )
        yield self._of_drafters(
            gauge,
            "draftline:drafter_circuit_open",
            "1: failed, and not tried again yet",
            lambda d: d.circuit_open,
        )

    def _drafter_counters(self) -> Iterator[Metric]:
        counter = CounterMetricFamily
        yield self._of_drafters(
            counter, "draftline:drafter_messages", "Messages sent", lambda d: d.messages
        )
        yield self._of_drafters(
            counter, "draftline:drafter_errors", "Failures of any kind", lambda d: d.errors
        )
        yield self._of_drafters(
            counter,
            "draftline:drafter_reconnects",
            "Connections after the first",
            lambda d: d.reconnects,
        )
        proposals = CounterMetricFamily(
            "draftline:drafter_proposals",
            "Proposals, by what became of them: in_time, late_used or dropped",
            labels=("model_name", "engine", "source", "outcome"),
        )
        for labels, drafter in self._drafters():
            proposals.add_metric((*labels, "in_time"), drafter.proposals - drafter.late_used)
            proposals.add_metric((*labels, "late_used"), drafter.late_used)
            proposals.add_metric((*labels, "dropped"), drafter.dropped)
        yield proposals

    def _drafter_latency(self) -> Metric:
        latency = SummaryMetricFamily(
            "draftline:drafter_latency_seconds",
            "From a message to its proposals; the sum over the count is the mean",
            labels=("model_name", "engine", "source"),
        )
        for labels, drafter in self._drafters():
            latency.add_metric(labels, drafter.latency_count, drafter.latency_sum_s)
        return latency

    def _drafters(self) -> Iterator[tuple[tuple[str, str, str], DrafterStats]]:
        for engine in self.stats:
            for drafter in engine.drafters:
                yield (self._model, engine.engine_id, drafter.name), drafter

    def _of_engines(
        self, kind: type[MetricT], name: str, text: str, value: Callable[[EngineStats], float]
    ) -> MetricT:
        family = kind(name, text, labels=("model_name", "engine"))
        for engine in self.stats:
            family.add_metric((self._model, engine.engine_id), value(engine))
        return family

    def _of_drafters(
        self, kind: type[MetricT], name: str, text: str, value: Callable[[DrafterStats], float]
    ) -> MetricT:
        family = kind(name, text, labels=("model_name", "engine", "source"))
        for labels, drafter in self._drafters():
            family.add_metric(labels, value(drafter))
        return family
