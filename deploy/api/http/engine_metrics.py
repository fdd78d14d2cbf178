"""Metrics that come from the engines when they are scraped: gauges, and totals as counters.

A total goes back to 0 with its engine. Prometheus takes that for a counter's reset; a replica that
Ray Serve replaces has another `engine` label, so no series ever mixes two engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from ....cluster.drafting.stats import DrafterStats
from ....core.fair_share import TenantTotals
from ....core.interfaces import CREDITED, DAMAGED, OUTCOMES
from ....core.step.in_flight import STEP_BOUNDS_S
from ...engine.stats import EngineStats

# Of one engine: the values of the labels that a family adds to these two, and a number.
Samples = Iterable[tuple[tuple[str, ...], float]]
LABELS = ("model_name", "engine")
SOURCE = ("source",)
TENANT = ("tenant",)


@dataclass(frozen=True, slots=True)
class _Row:
    """One family of metrics."""

    kind: type[GaugeMetricFamily | CounterMetricFamily]
    name: str
    text: str
    samples: Callable[[EngineStats], Samples]
    labels: tuple[str, ...] = ()


def _engine(value: Callable[[EngineStats], float]) -> Callable[[EngineStats], Samples]:
    return lambda engine: [((), value(engine))]


def _drafters(value: Callable[[DrafterStats], float]) -> Callable[[EngineStats], Samples]:
    return lambda engine: [((drafter.name,), value(drafter)) for drafter in engine.drafters]


def _wasted(engine: EngineStats) -> Samples:
    return [((source,), count) for source, count in engine.wasted_by_source.items()]


def _shadow(engine: EngineStats) -> Samples:
    return [((result,), count) for result, count in asdict(engine.shadow).items()]


def _proposals(engine: EngineStats) -> Samples:
    for drafter in engine.drafters:
        yield (drafter.name, "in_time"), drafter.proposals - drafter.late_used
        yield (drafter.name, "late_used"), drafter.late_used
        yield (drafter.name, "dropped"), drafter.dropped


def _ended(engine: EngineStats) -> Samples:
    # A drafter's server may send any text; only known outcomes become series.
    for drafter in engine.drafters:
        if drafter.learning:
            for outcome in OUTCOMES:
                yield (drafter.name, outcome), drafter.learning.get(outcome, 0)


def _tenants(value: Callable[[TenantTotals], float]) -> Callable[[EngineStats], Samples]:
    return lambda engine: [((name,), value(sums)) for name, sums in engine.by_tenant.items()]


def _learning(count: str) -> Callable[[EngineStats], Samples]:
    def samples(engine: EngineStats) -> Samples:
        learning = [drafter for drafter in engine.drafters if drafter.learning]
        return [((drafter.name,), drafter.learning.get(count, 0)) for drafter in learning]

    return samples


TABLE = (
    _Row(GaugeMetricFamily, "vllm:num_requests_running", "Requests being computed",
         _engine(lambda e: e.num_running)),
    _Row(GaugeMetricFamily, "vllm:num_requests_waiting", "Requests in the queue",
         _engine(lambda e: e.num_waiting)),
    _Row(GaugeMetricFamily, "vllm:kv_cache_usage_perc", "KV cache in use; 1 is full",
         _engine(lambda e: e.kv_usage)),
    _Row(CounterMetricFamily, "draftline:engine_steps", "Steps submitted",
         _engine(lambda e: e.num_steps)),
    _Row(CounterMetricFamily, "vllm:num_preemptions", "Requests that gave up their KV",
         _engine(lambda e: e.num_preemptions)),
    _Row(CounterMetricFamily, "draftline:not_finite_requests",
         "Requests that ended since the model's logits were NaN or infinite",
         _engine(lambda e: e.num_not_finite)),
    _Row(CounterMetricFamily, "draftline:stage_recoveries",
         "Times that lost stages were replaced, and requests went on",
         _engine(lambda e: e.num_recoveries)),
    _Row(CounterMetricFamily, "vllm:prefix_cache_queries",
         "Prompt tokens looked for in the prefix cache", _engine(lambda e: e.num_prefix_queries)),
    _Row(CounterMetricFamily, "vllm:prefix_cache_hits",
         "Prompt tokens found in the prefix cache", _engine(lambda e: e.num_prefix_hits)),
    _Row(CounterMetricFamily, "draftline:spec_decode_num_wasted_tokens",
         "Nodes verified and thrown away, by drafter", _wasted, SOURCE),
    _Row(CounterMetricFamily, "draftline:tree_chunks",
         "Chunks of pipelined trees sent through the stages",
         _engine(lambda e: e.tree_chunks.chunks)),
    _Row(CounterMetricFamily, "draftline:tree_chunk_nodes", "Nodes in these chunks",
         _engine(lambda e: e.tree_chunks.nodes)),
    _Row(CounterMetricFamily, "draftline:tree_chunk_pruned_nodes",
         "Nodes in these chunks that the text left before their answers",
         _engine(lambda e: e.tree_chunks.pruned_nodes)),
    _Row(CounterMetricFamily, "draftline:tree_chunk_idle_turns",
         "Turns of requests with pipelined trees that had nothing new to send",
         _engine(lambda e: e.tree_chunks.idle_turns)),
    _Row(CounterMetricFamily, "draftline:shadow_requests",
         "Requests repeated without drafts, by what came of it", _shadow, ("result",)),
    _Row(CounterMetricFamily, "draftline:tenant_requests", "Requests that ended, however",
         _tenants(lambda t: t.requests), TENANT),
    _Row(CounterMetricFamily, "draftline:tenant_prompt_tokens", "Prompt tokens",
         _tenants(lambda t: t.prompt_tokens), TENANT),
    _Row(CounterMetricFamily, "draftline:tenant_cached_tokens",
         "Prompt tokens whose KV was there already", _tenants(lambda t: t.cached_tokens), TENANT),
    _Row(CounterMetricFamily, "draftline:tenant_generation_tokens", "Tokens generated",
         _tenants(lambda t: t.completion_tokens), TENANT),
    _Row(CounterMetricFamily, "draftline:tenant_steps", "Steps that verified a root of a request",
         _tenants(lambda t: t.steps), TENANT),
    _Row(CounterMetricFamily, "draftline:tenant_nodes_verified", "Nodes verified",
         _tenants(lambda t: t.nodes_verified), TENANT),
    _Row(CounterMetricFamily, "draftline:tenant_nodes_wasted", "Nodes verified and thrown away",
         _tenants(lambda t: t.nodes_wasted), TENANT),
    _Row(CounterMetricFamily, "draftline:tenant_queue_seconds",
         "Seconds from arrival to the first place, of all its requests together",
         _tenants(lambda t: t.queue_s), TENANT),
    _Row(CounterMetricFamily, "draftline:usage_records_dropped",
         "Usage records that could not be written", _engine(lambda e: e.usage_dropped)),
    _Row(GaugeMetricFamily, "draftline:drafter_up", "1: connected",
         _drafters(lambda d: d.connected), SOURCE),
    _Row(GaugeMetricFamily, "draftline:drafter_servers",
         "Servers of a pool that requests may go to; of any other drafter 1 or 0",
         _drafters(lambda d: d.servers), SOURCE),
    _Row(GaugeMetricFamily, "draftline:drafter_circuit_open", "1: failed, and not tried again yet",
         _drafters(lambda d: d.circuit_open), SOURCE),
    _Row(GaugeMetricFamily, "draftline:drafter_left_out",
         "1: a head whose drafts are never right, and which is not asked any more",
         _drafters(lambda d: d.left_out), SOURCE),
    _Row(GaugeMetricFamily, "draftline:drafter_memory_bytes",
         "About what it keeps of requests and learned texts",
         _drafters(lambda d: d.memory_bytes), SOURCE),
    _Row(CounterMetricFamily, "draftline:drafter_prefix_queries",
         "Tokens of new texts looked for in a drafter's prefix cache",
         _drafters(lambda d: d.prefix.queries), SOURCE),
    _Row(CounterMetricFamily, "draftline:drafter_prefix_hits",
         "Of these tokens, those found", _drafters(lambda d: d.prefix.hits), SOURCE),
    _Row(CounterMetricFamily, "draftline:drafter_moved_requests",
         "Requests opened at another server of a pool", _drafters(lambda d: d.moved), SOURCE),
    _Row(CounterMetricFamily, "draftline:drafter_messages", "Messages sent",
         _drafters(lambda d: d.messages), SOURCE),
    _Row(CounterMetricFamily, "draftline:drafter_errors", "Failures of any kind",
         _drafters(lambda d: d.errors), SOURCE),
    _Row(CounterMetricFamily, "draftline:drafter_reconnects", "Connections after the first",
         _drafters(lambda d: d.reconnects), SOURCE),
    _Row(CounterMetricFamily, "draftline:drafter_proposals",
         "Proposals, by what became of them: in_time, late_used or dropped",
         _proposals, ("source", "outcome")),
    _Row(CounterMetricFamily, "draftline:learning_requests",
         "Ended requests of drafters that learn, by what became of them",
         _ended, ("source", "outcome")),
    _Row(CounterMetricFamily, "draftline:learning_credited_texts",
         "Learned texts that gained weight, because an answer took what they say",
         _learning(CREDITED), SOURCE),
    _Row(CounterMetricFamily, "draftline:learning_damaged_entries",
         "Entries of the store's logs that were passed over because they are damaged",
         _learning(DAMAGED), SOURCE),
)  # fmt: skip


class EngineCollector(Collector):
    """Makes the metrics of `stats`, which has one entry an engine that answered in time."""

    def __init__(self, model_name: str) -> None:
        self.stats: Sequence[EngineStats] = ()
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        """All families, those without samples too."""
        for row in TABLE:
            family = row.kind(row.name, row.text, labels=(*LABELS, *row.labels))
            for engine in self.stats:
                for labels, value in row.samples(engine):
                    family.add_metric((self._model, engine.engine_id, *labels), value)
            yield family
        yield self._drafter_latency()
        yield self._step_times()

    def _drafter_latency(self) -> Metric:
        latency = SummaryMetricFamily(
            "draftline:drafter_latency_seconds",
            "From a message to its proposals; the sum over the count is the mean",
            labels=(*LABELS, *SOURCE),
        )
        for engine in self.stats:
            for drafter in engine.drafters:
                labels = (self._model, engine.engine_id, drafter.name)
                latency.add_metric(labels, drafter.latency_count, drafter.latency_sum_s)
        return latency

    def _step_times(self) -> Metric:
        times = HistogramMetricFamily(
            "draftline:step_seconds",
            "From a step's submission, or the answer before it, to its answer",
            labels=LABELS,
        )
        ends = [*map(str, STEP_BOUNDS_S), "+Inf"]
        for engine in self.stats:
            counts = accumulate(engine.step_times.counts)
            times.add_metric(
                (self._model, engine.engine_id),
                list(zip(ends, counts, strict=True)),
                engine.step_times.sum_s,
            )
        return times
