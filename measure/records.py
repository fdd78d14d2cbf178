"""The client's measurements of requests, the figures of a run, and the machine.

Latencies are as vLLM's benchmark defines them, throughputs as SPECTRA does. Counts of speculation
come from the engine's metrics or from an answer's `metrics` block.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from ..core.request.output import TARGET_SOURCE, RequestMetrics

# No pass of a model is faster: parts that arrive closer together were sent together.
SAME_ARRIVAL_S = 2e-4
# A text, or a chat's messages with their `role` and `content`.
PromptInput = str | tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """The processor and the relevant versions."""

    processor: str
    cores: int
    python: str
    torch: str
    transformers: str

    def line(self) -> str:
        """A line for display."""
        return (
            f"{self.processor}, {self.cores} cores; Python {self.python}, torch {self.torch}, "
            f"transformers {self.transformers}"
        )

    def fields(self) -> dict[str, object]:
        """The facts by name, for JSON."""
        return asdict(self)


def machine() -> MachineRecord:
    """This machine."""
    return MachineRecord(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        python=platform.python_version(),
        torch=version("torch"),
        transformers=version("transformers"),
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A part of an answer.

    seconds    since its request was sent
    token_ids  None if the server does not report it
    sources    parallel to token_ids; empty if the server does not report it
    """

    seconds: float
    token_ids: tuple[int, ...] | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Record:
    """One answered request. Times are in seconds, and as vLLM's benchmark defines them.

    arrivals    at least one
    num_tokens  of the answer, as the server counts them
    counts      None if the server does not report it
    num_prompt_tokens  None if the server does not report it
    prompt_input, seed  the prompt itself, and the seed of its sampling
    turn        of its conversation, from 0
    """

    prompt: str
    text: str
    num_tokens: int
    arrivals: tuple[Arrival, ...]
    counts: SpecCounts | None = None
    num_prompt_tokens: int | None = None
    prompt_input: PromptInput = ""
    seed: int | None = 0
    turn: int = 0

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0].seconds

    @property
    def e2el(self) -> float:
        """End-to-end latency: until the last token."""
        return self.arrivals[-1].seconds

    @property
    def tpot(self) -> float | None:
        """Time per output token without the first; None for an answer of one token."""
        if self.num_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: gaps between arrivals, each of one token or more."""
        return [late.seconds - early.seconds for early, late in pairwise(self.arrivals)]

    @cached_property
    def token_ids(self) -> tuple[int, ...] | None:
        """The whole answer; None if the server does not report it."""
        parts = [arrival.token_ids for arrival in self.arrivals]
        known = [part for part in parts if part is not None]
        return sum(known, ()) if len(known) == len(parts) else None

    @property
    def step_rates(self) -> list[float]:
        """Tokens a second of every step after the first arrival; empty without token ids.

        Arrivals that the client read together are one step.
        """
        if self.token_ids is None:
            return []
        rates, begin, tokens = [], self.arrivals[0].seconds, 0
        for arrival in self.arrivals[1:]:
            tokens += len(arrival.token_ids or ())
            gap = arrival.seconds - begin
            if gap >= SAME_ARRIVAL_S and tokens:
                rates.append(tokens / gap)
                begin, tokens = arrival.seconds, 0
        return rates


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCounts:
    """Totals of one or more answers.

    num_steps    verification steps
    committed    tokens that they committed, bonus tokens included
    drafted, accepted  nodes by source
    lengths      lengths[n] steps accepted n nodes
    """

    num_steps: int
    committed: int
    drafted: Mapping[str, int]
    accepted: Mapping[str, int]
    lengths: tuple[int, ...]

    @property
    def tau(self) -> float:
        """Mean tokens that a verification step committed; 1 before any."""
        return self.committed / self.num_steps if self.num_steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified nodes that were accepted."""
        drafted = sum(self.drafted.values())
        return sum(self.accepted.values()) / drafted if drafted else 0.0

    def kappa(self, draft_length: int) -> float:
        """Accepted draft tokens a step times `draft_length` / k (SpecFormer, arXiv 2511.20340).

        draft_length  most tokens of a path, l_d
        k             mean draft tokens verified in a step: of a chain its length, of a tree more

        The bonus token is not counted, so plain decoding has 0; the formula can also be read with
        it, which gives plain decoding 1. Chains that the budget or the end of an answer cuts short
        count with k = l_d.
        """
        drafted = sum(self.drafted.values())
        if not drafted:
            return 0.0
        accepted = sum(self.accepted.values()) / self.num_steps
        return accepted * min(1.0, draft_length * self.num_steps / drafted)

    @property
    def by_position(self) -> list[float]:
        """Share of the steps that accepted a node at depth 0, 1, and so on."""
        steps = sum(self.lengths)
        return [sum(self.lengths[depth:]) / steps for depth in range(1, len(self.lengths))]


def from_metrics(metrics: RequestMetrics) -> SpecCounts:
    """Counts of an answer of an engine in this process."""
    histogram = Counter(metrics.accepted_lengths)
    return SpecCounts(
        num_steps=metrics.num_steps,
        committed=metrics.generated_tokens - 1 if metrics.num_steps else 0,
        drafted=dict(metrics.drafted_by_source),
        accepted=dict(metrics.accepted_by_source),
        lengths=tuple(histogram[n] for n in range(max(histogram, default=-1) + 1)),
    )


def from_block(block: Mapping[str, Any]) -> SpecCounts:
    """Counts of `metrics.speculative_decoding` of a draftline server's answer."""
    steps, sources = block["num_spec_steps"], block["by_source"]
    return SpecCounts(
        num_steps=steps,
        committed=round(block["mean_acceptance_length"] * steps),
        drafted={name: counts["num_draft_tokens"] for name, counts in sources.items()},
        accepted={name: counts["num_accepted_tokens"] for name, counts in sources.items()},
        lengths=tuple(block["acceptance_histogram"]),
    )


def from_timings(timings: Mapping[str, Any]) -> SpecCounts | None:
    """Counts of `timings` of an answer of llama.cpp's server; None where it drafted nothing.

    It has no counts of single passes, so `lengths` is empty.
    """
    if not timings.get("draft_n"):
        return None
    accepted, committed = timings["draft_n_accepted"], timings["predicted_n"] - 1
    return SpecCounts(
        num_steps=committed - accepted,
        committed=committed,
        drafted={"draft": timings["draft_n"]},
        accepted={"draft": accepted},
        lengths=(),
    )


def total(counts: Iterable[SpecCounts]) -> SpecCounts:
    """The sum of all counts."""
    parts = list(counts)
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for part in parts:
        drafted.update(part.drafted)
        accepted.update(part.accepted)
    return SpecCounts(
        num_steps=sum(part.num_steps for part in parts),
        committed=sum(part.committed for part in parts),
        drafted=dict(drafted),
        accepted=dict(accepted),
        lengths=tuple(map(sum, zip_longest(*(part.lengths for part in parts), fillvalue=0))),
    )


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
