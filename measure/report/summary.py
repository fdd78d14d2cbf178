"""Summaries of matched runs, one for each setting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..records.run_metrics import RunMetrics, run_metrics
from ..runs.equality import Difference
from ..runs.matched import Run, Runs
from .intervals import TauRow


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
    """

    setup: dict[str, Any]
    summaries: tuple[Summary, ...]
    differences: tuple[Difference, ...] | None
    taus: tuple[TauRow, ...] = ()
    draft_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

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
