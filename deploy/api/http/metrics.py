"""Prometheus metrics under the names that vLLM's dashboards and planners read.

`vllm:` names mean what they mean there; `draftline:` ones are ours and carry the drafter as
`source`. What is counted a request is taken from finished requests, the rest from the engines when
scraped. docs/operations.md, "Metrics", lists them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from ....cluster.drafting.replies import DrafterStats
from ....core.fair_share import BoundedNames, TenantTotals
from ....core.interfaces import CREDITED, DAMAGED, OUTCOMES
from ....core.request.output import Delta, RequestMetrics
from ....core.step.in_flight import STEP_BOUNDS_S
from ...engine.stats import EngineStats
from ..engine_client import EngineClient

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


# Of each finished request, what is added to a total.
REQUEST_TOTALS: Sequence[tuple[str, str, Callable[[RequestMetrics], float]]] = (
    ("vllm:prompt_tokens", "Prompt tokens of answers", lambda m: m.prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated", lambda m: m.generated_tokens),
    ("vllm:spec_decode_num_drafts", "Verification steps", lambda m: m.num_steps),
    ("vllm:spec_decode_num_draft_tokens", "Nodes verified", lambda m: m.num_draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Nodes accepted", lambda m: m.num_accepted_tokens),
)
# And what is observed in a histogram of these buckets.
REQUEST_SPREADS: Sequence[tuple[str, str, Sequence[float], Callable[[RequestMetrics], float]]] = (
    ("vllm:request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS,
     lambda m: m.prompt_tokens),
    ("vllm:request_generation_tokens", "Tokens of an answer", TOKEN_BUCKETS,
     lambda m: m.generated_tokens),
    ("vllm:time_to_first_token_seconds", "From arrival to the first token", LATENCY_BUCKETS,
     lambda m: m.first_token_time - m.arrival_time),
    ("vllm:request_queue_time_seconds", "From arrival to the end of waiting", LATENCY_BUCKETS,
     lambda m: m.start_time - m.arrival_time),
    ("vllm:request_prefill_time_seconds", "From the end of waiting to the first token",
     LATENCY_BUCKETS, lambda m: m.first_token_time - m.start_time),
    ("vllm:request_decode_time_seconds", "From the first token to the last", LATENCY_BUCKETS,
     lambda m: m.finish_time - m.first_token_time),
    ("vllm:e2e_request_latency_seconds", "From arrival to the last token", LATENCY_BUCKETS,
     lambda m: m.finish_time - m.arrival_time),
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


def page_of(collector: Collector) -> bytes:
    """What a collector has, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


class AnsweringPage(AnswerRecorder, MetricsPage, Protocol):
    """Both, of one model."""


class ServerMetrics(Collector):
    """All metrics of one served model.

    ingress  id of the HTTP replica that counts the requests. Ray Serve answers each `/metrics` from
             any of them; with this label no series mixes the counts of two. None: there is one
    """

    def __init__(self, model_name: str, ingress: str | None = None) -> None:
        # What is counted here; the engines tell the rest.
        self._counts = CollectorRegistry()
        self._ingress = {} if ingress is None else {"ingress": ingress}
        self._engines = EngineCollector(model_name)
        self._model = model_name
        self._totals = [(self._counter(name, text), value) for name, text, value in REQUEST_TOTALS]
        self._spreads = [
            (self._histogram(name, text, buckets), value)
            for name, text, buckets, value in REQUEST_SPREADS
        ]
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
        inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between the deltas of an answer"
        )
        # Looked up once, since it is used for every delta.
        self._gaps = inter_token.labels(model_name)
        self._token_time = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a request's tokens behind the first",
        )
        self._accepted_at = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Nodes accepted, by depth", "position"
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
        self._success.labels(model, reason).inc()
        for total, value in self._totals:
            total.labels(model).inc(value(metrics))
        for spread, value in self._spreads:
            spread.labels(model).observe(value(metrics))
        if metrics.generated_tokens > 1:
            decode_s = metrics.finish_time - metrics.first_token_time
            self._token_time.labels(model).observe(decode_s / (metrics.generated_tokens - 1))
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
        return page_of(self)

    def take(self, stats: Sequence[EngineStats]) -> None:
        """Show these engines from now on."""
        self._engines.stats = stats

    def collect(self) -> Iterable[Metric]:
        """All families."""
        yield from self._engines.collect()
        for family in self._counts.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, **self._ingress})
                for sample in family.samples
            ]
            yield family

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("model_name", *labels), registry=self._counts)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        return Histogram(name, text, ("model_name",), registry=self._counts, buckets=buckets)


class JointMetrics(Collector):
    """The page of several models. A request that is refused before its body is read is of none, and
    counts with an empty `model_name`.

    by_model  in the order of the engine clients
    ingress   as for `ServerMetrics`
    """

    def __init__(self, by_model: Sequence[ServerMetrics], ingress: str | None = None) -> None:
        self._by_model = by_model
        self._of_none = ServerMetrics("", ingress)

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
        return page_of(self)

    def collect(self) -> Iterable[Metric]:
        """All families, each once with the samples of all models."""
        families: dict[str, Metric] = {}
        for metrics in (*self._by_model, self._of_none):
            for family in metrics.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return families.values()


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
    _Row(GaugeMetricFamily, "draftline:stage_memory_bytes",
         "What a stage keeps of the target: weights, kv or states",
         lambda e: (((str(stage), kind), size) for stage, memory in enumerate(e.stage_memory)
                    for kind, size in memory._asdict().items()),
         ("stage", "kind")),
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
