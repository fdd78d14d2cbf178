"""The figures of one run: latencies as vLLM's benchmark defines them, SPECTRA's throughputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.request.output import TARGET_SOURCE
from .record import Record
from .spec_counts import SpecCounts, total


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds over all requests, or over all gaps. P99 is interpolated, as numpy does it."""

    mean: float
    median: float
    p99: float
    std: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """One run of one setting.

    seconds             from the first request sent to the last answer
    num_prompt_tokens   None if the server does not report it
    request_throughput, output_throughput  requests and tokens a second, over all requests
    mac_tp              mean over all steps of (tokens / seconds); None if the server does not
                        report the tokens of each step (SPECTRA, ACL 2025)
    mic_tp              tokens of all requests / seconds of all requests; at one request at a time
                        this is output_throughput
    tpot, itl           None where every answer has one token
    position_by_source  position_by_source[name][depth]: accepted nodes, if the server reports them
    """

    num_requests: int
    num_tokens: int
    seconds: float
    request_throughput: float
    output_throughput: float
    mac_tp: float | None
    mic_tp: float
    ttft: Latency
    tpot: Latency | None
    itl: Latency | None
    e2el: Latency
    counts: SpecCounts | None
    position_by_source: dict[str, list[int]]
    num_prompt_tokens: int | None = None

    def serve_fields(self) -> dict[str, float | int | list[float] | None]:
        """The figures under the names that `vllm bench serve` writes; latencies in ms."""
        fields: dict[str, float | int | list[float] | None] = {
            "duration": self.seconds,
            "completed": self.num_requests,
            "failed": 0,
            "total_input_tokens": self.num_prompt_tokens,
            "total_output_tokens": self.num_tokens,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": None,
        }
        if self.num_prompt_tokens is not None:
            total_tokens = self.num_prompt_tokens + self.num_tokens
            fields["total_token_throughput"] = total_tokens / self.seconds
        for name in ("ttft", "tpot", "itl", "e2el"):
            own: Latency | None = getattr(self, name)
            for part in ("mean", "median", "std", "p99"):
                key = f"{part}_{name}_ms"
                fields[key] = None if own is None else 1000 * getattr(own, part)
        if self.counts is not None:
            fields |= _spec_decode_fields(self.counts)
        return fields


def run_metrics(records: Sequence[Record], seconds: float) -> RunMetrics:
    """The metrics of `records`, at least one, of a run that took `seconds`."""
    tokens = sum(record.num_tokens for record in records)
    rates = [rate for record in records for rate in record.step_rates]
    counts = [record.counts for record in records if record.counts is not None]
    tpot = [record.tpot for record in records if record.tpot is not None]
    itl = [gap for record in records for gap in record.itl]
    return RunMetrics(
        num_requests=len(records),
        num_tokens=tokens,
        seconds=seconds,
        request_throughput=len(records) / seconds,
        output_throughput=tokens / seconds,
        mac_tp=float(np.mean(rates)) if rates else None,
        mic_tp=tokens / sum(record.e2el for record in records),
        ttft=latency([record.ttft for record in records]),
        tpot=latency(tpot) if tpot else None,
        itl=latency(itl) if itl else None,
        e2el=latency([record.e2el for record in records]),
        counts=total(counts) if len(counts) == len(records) else None,
        position_by_source=_position_by_source(records),
        num_prompt_tokens=_sum([record.num_prompt_tokens for record in records]),
    )


def latency(seconds: Sequence[float]) -> Latency:
    """Mean, median, 99th percentile and standard deviation of at least one figure."""
    values = np.asarray(seconds)
    figures = values.mean(), np.median(values), np.percentile(values, 99), values.std()
    return Latency(*map(float, figures))


def _spec_decode_fields(counts: SpecCounts) -> dict[str, float | int | list[float]]:
    return {
        "spec_decode_acceptance_rate": 100 * counts.acceptance_rate,
        "spec_decode_acceptance_length": counts.tau,
        "spec_decode_num_drafts": counts.num_steps,
        "spec_decode_draft_tokens": sum(counts.drafted.values()),
        "spec_decode_accepted_tokens": sum(counts.accepted.values()),
        "spec_decode_per_position_acceptance_rates": counts.by_position,
    }


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _position_by_source(records: Sequence[Record]) -> dict[str, list[int]]:
    """Accepted nodes by source and depth; skips the first arrival, which comes from the prompt's
    pass."""
    accepted: Counter[tuple[str, int]] = Counter()
    for record in records:
        for arrival in record.arrivals[1:]:
            accepted.update(
                (source, depth)
                for depth, source in enumerate(arrival.sources)
                if source != TARGET_SOURCE
            )
    depths = max((depth for _, depth in accepted), default=-1) + 1
    return {
        source: [accepted[source, depth] for depth in range(depths)]
        for source in sorted({source for source, _ in accepted})
    }
