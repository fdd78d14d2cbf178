"""Summaries of matched runs, one for each setting, and confidence intervals of tau.

The intervals come from a bootstrap over prompts. A draw takes as many prompts as there are, with
replacement (Efron 1979); tau is the sum of their tokens over the sum of their steps. Settings share
the draws, so that the difficulty of prompts cancels in their difference.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ...core.arrays import Float64
from ..records import RunMetrics, run_metrics
from ..runs.matched import Difference, Run, Runs

NUM_DRAWS = 4000
# Ends of the intervals, in percent of the draws.
ENDS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """The verdict on a difference: whether it is significant."""
        if self.low > 0:
            return "higher"
        return "lower" if self.high < 0 else "undecided"


@dataclass(frozen=True, slots=True)
class TauRow:
    """tau of one setting.

    difference   to the setting above; None of the first
    by_category  if prompts have several categories, in their order
    by_prompt    of each prompt: committed tokens and steps of all rounds
    """

    name: str
    tau: Interval
    difference: Interval | None
    by_category: dict[str, Interval]
    by_prompt: tuple[tuple[int, int], ...] = ()


def tau_rows(runs: Runs, categories: Sequence[str]) -> tuple[TauRow, ...]:
    """A row for each setting that counts steps; `categories` of the prompts, in their order.

    All turns of a conversation are drawn together.
    """
    counts = {name: counts_of(runs[name]) for name in runs}
    names = [name for name, known in counts.items() if known is not None]
    if not names:
        return ()
    totals = np.stack([known for known in counts.values() if known is not None])
    kinds = list(dict.fromkeys(categories))
    whole, drawn = drawn_taus(totals)
    parts = {}
    if len(kinds) > 1:
        places = np.array([kinds.index(category) for category in categories])
        parts = {kind: drawn_taus(totals[:, places == at]) for at, kind in enumerate(kinds)}
    return tuple(
        TauRow(
            name,
            interval(whole[row], drawn[:, row]),
            interval(whole[row] - whole[row - 1], drawn[:, row] - drawn[:, row - 1])
            if row
            else None,
            {kind: interval(taus[row], draws[:, row]) for kind, (taus, draws) in parts.items()},
            tuple((int(tokens), int(steps)) for tokens, steps in totals[row].tolist()),
        )
        for row, name in enumerate(names)
    )


def counts_of(rounds: Sequence[Run]) -> Float64 | None:
    """float64 [prompts, 2]: committed tokens and steps of all rounds; None if a record has no
    counts."""
    rows: list[list[tuple[int, int]]] = []
    for run in rounds:
        prompts: list[tuple[int, int]] = []
        for record in run.records:
            if record.counts is None:
                return None
            own = record.counts.committed, record.counts.num_steps
            if record.turn:
                before = prompts.pop()
                own = before[0] + own[0], before[1] + own[1]
            prompts.append(own)
        rows.append(prompts)
    return np.array(rows, dtype=np.float64).sum(axis=0)


def drawn_taus(totals: Float64) -> tuple[Float64, Float64]:
    """float64 [settings], tau of all prompts, and float64 [draws, settings] of bootstrap draws.

    totals  float64 [settings, prompts, 2]
    """
    count = totals.shape[1]
    rng = np.random.default_rng(0)
    weights = rng.multinomial(count, np.full(count, 1 / count), NUM_DRAWS).astype(np.float64)
    drawn = np.einsum("dp,spk->dsk", weights, totals, optimize=True)
    whole = totals.sum(axis=1)
    return _ratio(whole), _ratio(drawn)


def _ratio(totals: Float64) -> Float64:
    """Tokens a step; 1 before any, as in `SpecCounts.tau`."""
    tokens, steps = totals[..., 0], totals[..., 1]
    return np.where(steps > 0, tokens / np.maximum(steps, 1.0), 1.0)


def interval(value: float, drawn: Float64) -> Interval:
    """The 95 % interval of a value, from draws of it."""
    low, high = np.percentile(drawn, ENDS)
    return Interval(float(value), float(low), float(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One setting over all rounds.

    rates     output tokens a second, one a round
    speedups  ratio to the reference's rate of the same round, one a round
    whole     the figures over the requests of all rounds
    same      answers that equal the reference's, of all of them
    processor_speedups  the reference's processor time a token over this one's, one a round; empty
                        if not measured
    """

    name: str
    rates: tuple[float, ...]
    speedups: tuple[float, ...]
    whole: RunMetrics
    same: int
    rounds: tuple[RunMetrics, ...]
    processor_speedups: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Median of output tokens a second over rounds."""
        return statistics.median(self.rates)

    @property
    def speedup(self) -> float:
        """Median over rounds of the ratio to the reference's rate."""
        return statistics.median(self.speedups)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The setup and results of a benchmark of matched runs.

    setup        machine, prompts and load, for JSON
    differences  None where answers were not compared
    taus         of the settings with step counts
    draft_ms     milliseconds of a draft, by setting and drafter, if known
    draft_lengths  most tokens of a path, by setting, of those whose kappa is reported
    """

    setup: dict[str, Any]
    summaries: tuple[Summary, ...]
    differences: tuple[Difference, ...] | None
    taus: tuple[TauRow, ...] = ()
    draft_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    draft_lengths: Mapping[str, int] = field(default_factory=dict)

    def kappa(self, summary: Summary) -> float | None:
        """`SpecCounts.kappa` over all rounds of a setting of one drafter; None of others."""
        length, counts = self.draft_lengths.get(summary.name), summary.whole.counts
        return None if length is None or counts is None else counts.kappa(length)

    def theta(self, summary: Summary) -> float | None:
        """kappa / speedup: what a setting pays for its speed; lower is better."""
        kappa = self.kappa(summary)
        return None if kappa is None else kappa / summary.speedup

    @property
    def faults(self) -> list[Difference]:
        """Differences that float rounding does not explain."""
        return [difference for difference in self.differences or () if difference.is_fault]

    def fields(self) -> dict[str, Any]:
        """Setup, figures and differences by name, for JSON; times are in seconds."""
        return {
            **self.setup,
            "settings": {
                summary.name: {
                    "output_throughput": summary.rate,
                    "speedup": summary.speedup,
                    "tau": summary.whole.counts.tau if summary.whole.counts else None,
                    "kappa": self.kappa(summary),
                    "theta": self.theta(summary),
                    "same_answers": summary.same,
                    "rates": summary.rates,
                    "speedups": summary.speedups,
                    "processor_speedups": summary.processor_speedups,
                    "serve": summary.whole.serve_fields(),
                    "all_rounds": asdict(summary.whole),
                    "rounds": [asdict(metrics) for metrics in summary.rounds],
                }
                for summary in self.summaries
            },
            "taus": [asdict(row) for row in self.taus],
            "draft_ms": self.draft_ms,
            "differences": self.differences and [asdict(each) for each in self.differences],
        }


def summarise(runs: Runs, reference: str) -> tuple[Summary, ...]:
    """One summary for each setting, in the order of `runs`; speedups are over `reference`."""
    plain = _rates(runs[reference])
    answers = _answers(runs[reference][0])
    summaries = []
    for name, rounds in runs.items():
        rates = _rates(rounds)
        records = [record for run in rounds for record in run.records]
        summaries.append(
            Summary(
                name=name,
                rates=tuple(rates),
                speedups=tuple(rate / base for rate, base in zip(rates, plain, strict=True)),
                whole=run_metrics(records, sum(run.metrics.seconds for run in rounds)),
                same=sum(
                    a == b for run in rounds for a, b in zip(answers, _answers(run), strict=True)
                ),
                rounds=tuple(run.metrics for run in rounds),
                processor_speedups=_processor_speedups(rounds, runs[reference]),
            )
        )
    return tuple(summaries)


def _processor_speedups(rounds: Sequence[Run], plain: Sequence[Run]) -> tuple[float, ...]:
    if not all(run.processor_s for run in (*rounds, *plain)):
        return ()
    taken = ([run.processor_s / run.metrics.num_tokens for run in one] for one in (plain, rounds))
    return tuple(base / own for base, own in zip(*taken, strict=True))


def _rates(rounds: Sequence[Run]) -> list[float]:
    return [run.metrics.output_throughput for run in rounds]


def _answers(run: Run) -> Sequence[object]:
    return [record.text if record.token_ids is None else record.token_ids for record in run.records]
