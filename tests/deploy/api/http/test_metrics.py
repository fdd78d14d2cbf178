"""Names, types and labels of the metrics are those of docs/operations.md; totals are counters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from draftline.core.fair_share import MAX_TENANTS
from draftline.core.interfaces import OUTCOMES
from draftline.core.request.output import Delta, RequestMetrics
from draftline.deploy.api.http.metrics import JointMetrics, ServerMetrics, page_of
from draftline.deploy.api.routes.operations import server_info
from draftline.deploy.engine.stats import EngineStats
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from support.fakes.fake_engine import engine_stats
from support.tools.pages import DOCS, sections

ROW = re.compile(r"^\| `(\S+)` \| (\w+) \| (.*?) ?\| .+ \|$")
# A histogram's buckets and a summary's quantiles have labels of their own.
OWN_LABELS = {"model_name", "le", "quantile"}


def finished() -> RequestMetrics:
    return RequestMetrics(
        prompt_tokens=7, generated_tokens=5, num_steps=2, num_draft_tokens=6,
        drafted_by_source={"spectra": 6}, accepted_by_source={"spectra": 2},
        accepted_lengths=(2, 0), arrival_time=10.0, start_time=10.5, first_token_time=12.0,
        finish_time=13.0,
    )  # fmt: skip


def families(metrics: ServerMetrics, stats: Sequence[EngineStats]) -> dict[str, Metric]:
    """By the name that a query uses."""
    found = text_string_to_metric_families(metrics.render(stats).decode())
    return {
        f"{family.name}_total" if family.type == "counter" else family.name: family
        for family in found
    }


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The one sample with these labels."""
    family = next(f for f in families.values() if any(s.name == name for s in f.samples))
    (found,) = [
        sample.value
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


def test_the_table_of_the_docs_is_complete_and_true() -> None:
    metrics = ServerMetrics("tiny")
    delta = Delta(
        request_id="a", token_ids=(1,), sources=("target",), text="", finish_reason="stop",
        metrics=finished(),
    )  # fmt: skip
    metrics.record(delta, 0.1)
    metrics.record_resumed("replica_died")
    metrics.record_lost("replica_died")
    metrics.record_routed("load", 7, 0)
    metrics.refused("acme", "tokens")
    metrics.store_failed("tenants")
    exposed = {
        (
            name,
            family.type,
            tuple(sorted(set().union(*(s.labels for s in family.samples)) - OWN_LABELS)),
        )
        for name, family in families(metrics, [engine_stats()]).items()
        # What prometheus_client adds to each counter.
        if not name.endswith("_created")
    }
    page = sections(DOCS / "operations.md")["Metrics"]
    rows = [found.groups() for line in page.splitlines() if (found := ROW.match(line))]
    told = {
        (name, kind, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, kind, labels in rows
    }
    assert told == exposed
    assert len(rows) == len(told)


def test_what_an_http_replica_of_ray_counts_has_its_id() -> None:
    one, other = ServerMetrics("tiny", "a1b2"), ServerMetrics("large", "a1b2")
    for metrics in (one, other):
        metrics.take([engine_stats()])
    for page in (one, JointMetrics([one, other], "a1b2")):
        page.refused("acme", "tokens")
        seen: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(page_of(page).decode()):
            for sample in family.samples:
                # Each has one of both.
                [label] = {"engine", "ingress"} & sample.labels.keys()
                seen.setdefault(label, set()).add(sample.labels[label])
        assert seen == {"engine": {"0"}, "ingress": {"a1b2"}}


def test_engine_totals() -> None:
    found = families(ServerMetrics("tiny"), [engine_stats(num_steps=17)])
    assert value(found, "draftline:engine_steps_total", engine="0") == 17
    assert value(found, "vllm:num_preemptions_total") == 4
    assert value(found, "draftline:stage_recoveries_total") == 19
    assert value(found, "vllm:prefix_cache_queries_total") == 100
    assert value(found, "vllm:prefix_cache_hits_total") == 64
    assert value(found, "draftline:spec_decode_num_wasted_tokens_total", source="spectra") == 11
    assert value(found, "draftline:tree_chunks_total") == 17
    chunks = {"nodes": 90, "pruned_nodes": 21, "idle_turns": 14}
    for name, count in chunks.items():
        assert value(found, f"draftline:tree_chunk_{name}_total") == count
    for kind, size in (("weights", 1002), ("kv", 6), ("states", 7)):
        assert value(found, "draftline:stage_memory_bytes", stage="1", kind=kind) == size
    proposals = "draftline:drafter_proposals_total"
    assert value(found, proposals, outcome="in_time") == 25
    assert value(found, proposals, outcome="late_used") == 5
    assert value(found, proposals, outcome="dropped") == 7
    assert value(found, "draftline:drafter_servers", source="spectra") == 12
    assert value(found, "draftline:drafter_errors_total", source="spectra") == 3
    assert value(found, "draftline:drafter_up") == 1
    assert value(found, "draftline:drafter_circuit_open") == 0
    assert value(found, "draftline:drafter_left_out") == 0
    assert value(found, "draftline:drafter_latency_seconds_sum") == 1.5
    assert value(found, "draftline:drafter_latency_seconds_count") == 35
    ended = "draftline:learning_requests_total"
    assert value(found, ended, source="spectra", outcome="learned") == 13
    assert value(found, ended, source="spectra", outcome="off") == 6
    assert value(found, ended, source="spectra", outcome="failed") == 0
    assert value(found, "draftline:learning_credited_texts_total", source="spectra") == 8
    assert value(found, "draftline:learning_damaged_entries_total", source="spectra") == 2


def test_a_head_that_was_left_out_is_told() -> None:
    stats = engine_stats()
    strange = replace(stats.drafters[0], name="head", connected=False, left_out=True)
    found = families(ServerMetrics("tiny"), [replace(stats, drafters=(*stats.drafters, strange))])
    assert value(found, "draftline:drafter_left_out", source="head") == 1
    assert value(found, "draftline:drafter_left_out", source="spectra") == 0
    [engine] = server_info({}, {"tiny": [replace(stats, drafters=(strange,))]})["engines"]
    assert engine["drafters"] == [{"name": "head", "connected": False, "left_out": True}]


def test_what_a_drafter_makes_up_is_no_series() -> None:
    found = families(ServerMetrics("tiny"), [engine_stats()])
    samples = found["draftline:learning_requests_total"].samples
    assert sorted(sample.labels["outcome"] for sample in samples) == sorted(OUTCOMES)


def test_request_histograms() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_finish("stop", finished())
    found = families(metrics, [])
    assert value(found, "vllm:request_prompt_tokens_sum") == 7
    assert value(found, "vllm:request_generation_tokens_sum") == 5
    assert value(found, "vllm:request_queue_time_seconds_sum") == 0.5
    assert value(found, "vllm:request_prefill_time_seconds_sum") == 1.5
    assert value(found, "vllm:request_time_per_output_token_seconds_sum") == 0.25
    lengths = "draftline:spec_decode_accepted_length"
    assert value(found, f"{lengths}_bucket", le="0.0") == 1
    assert value(found, f"{lengths}_bucket", le="2.0") == value(found, f"{lengths}_count") == 2
    assert value(found, f"{lengths}_sum") == 2


def test_step_times_are_a_histogram() -> None:
    found = families(ServerMetrics("tiny"), [engine_stats()])
    steps = "draftline:step_seconds"
    assert value(found, f"{steps}_bucket", le="0.0005") == 0
    assert value(found, f"{steps}_bucket", le="0.001") == 15
    assert value(found, f"{steps}_bucket", le="10.0") == 18
    assert value(found, f"{steps}_bucket", le="+Inf") == value(found, f"{steps}_count") == 19
    assert value(found, f"{steps}_sum") == 12.5


def test_a_replaced_replica_begins_a_series_and_leaves_none_behind() -> None:
    metrics = ServerMetrics("tiny")
    before = families(metrics, [engine_stats("a", num_steps=50), engine_stats("b", num_steps=7)])
    assert value(before, "draftline:engine_steps_total", engine="a") == 50
    # Answers may come in another order.
    after = families(metrics, [engine_stats("c", num_steps=1), engine_stats("b", num_steps=9)])
    steps = after["draftline:engine_steps_total"].samples
    assert {sample.labels["engine"]: sample.value for sample in steps} == {"c": 1, "b": 9}
    assert after["draftline:engine_steps_total"].type == "counter"


def test_tenants_beyond_a_number_are_one_label() -> None:
    metrics = ServerMetrics("tiny")
    for number in range(MAX_TENANTS + 20):
        metrics.refused(f"t{number}", "requests")
    metrics.refused("t1", "requests")
    found = families(metrics, [engine_stats()])
    name = "draftline:tenant_refusals_total"
    assert value(found, name, tenant="t1") == 2
    assert value(found, name, tenant="other") == 20
    assert value(found, "draftline:tenant_nodes_wasted_total", tenant="acme") == 23
