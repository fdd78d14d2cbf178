"""Figures of a step trace: how busy each stage was, and what the steps brought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from rich.table import Table

from ....core.step.trace import StepRecord

Kind = Literal["prompt", "tree", "slice", "mixed"]
KINDS: tuple[Kind, ...] = ("prompt", "tree", "slice", "mixed")


def kind_of(record: StepRecord) -> Kind:
    """Whether a step held prompt rows, trees, slices of trees, or prompt rows and trees."""
    if not record.requests:
        return "prompt"
    if record.prompt_rows:
        return "mixed"
    return "slice" if record.slices else "tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """Seconds that a stage worked, as a share of the trace, and a median step's."""

    utilisation: float
    median_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Figures over steps. Seconds, or counts a step.

    seconds     from the first step's planning to the last one's commit
    step_s      median time from a step's planning to its commit
    tau         tokens committed a verification step of a request, bonus token included
    draft_wait  share of the time that the engine waited for drafters
    accepted    share of the verified nodes that were committed, by source
    killed      share of the nodes in slices that the text had left before they were answered
    """

    first: int
    last: int
    seconds: float
    kinds: dict[Kind, int]
    step_s: float
    mean_rows: float
    mean_nodes: float
    tau: float
    draft_wait: float
    accepted: dict[str, float]
    killed: float
    stages: tuple[StageSummary, ...]


def summarise(records: Sequence[StepRecord]) -> TraceSummary:
    """Figures of these steps, in order; there is at least one."""
    begin = records[0].planned_at
    seconds = max(max(record.committed_at for record in records) - begin, 1e-9)
    verified, accepted = Counter[str](), Counter[str]()
    for record in records:
        verified.update(record.nodes_by_source)
        accepted.update(record.accepted_by_source)
    kinds = Counter(map(kind_of, records))
    slices = [counts for record in records for counts in record.slices]
    return TraceSummary(
        first=records[0].step,
        last=records[-1].step,
        seconds=seconds,
        kinds={kind: kinds[kind] for kind in KINDS},
        step_s=median(record.committed_at - record.planned_at for record in records),
        mean_rows=fmean(record.rows for record in records),
        mean_nodes=fmean(record.tree_nodes for record in records),
        tau=sum(r.tokens for r in records) / max(sum(r.requests for r in records), 1),
        draft_wait=sum(record.draft_wait_s for record in records) / seconds,
        accepted={source: accepted[source] / count for source, count in sorted(verified.items())},
        killed=sum(c.killed for c in slices) / max(sum(c.nodes for c in slices), 1),
        stages=tuple(_stage(records, index, seconds) for index in range(len(records[0].stages))),
    )


def summary_table(summary: TraceSummary) -> Table:
    """The figures as two columns."""
    table = Table(box=None, show_header=False, pad_edge=False)
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.kinds.items() if count)
    table.add_row("steps", f"{summary.first} to {summary.last} ({kinds})")
    table.add_row("time", f"{summary.seconds:.3f} s")
    table.add_row("step, median", f"{1e3 * summary.step_s:.1f} ms from planning to commit")
    table.add_row("rows, mean", f"{summary.mean_rows:.1f}, of them {summary.mean_nodes:.1f} nodes")
    table.add_row("tau", f"{summary.tau:.2f}")
    table.add_row("waiting for drafters", f"{summary.draft_wait:.1%} of the time")
    for source, share in summary.accepted.items():
        table.add_row(f"accepted of {source}", f"{share:.1%} of its nodes")
    if summary.kinds["slice"]:
        table.add_row("killed in flight", f"{summary.killed:.1%} of the nodes in slices")
    for index, stage in enumerate(summary.stages):
        median_ms = 1e3 * stage.median_s
        table.add_row(f"stage {index}", f"busy {stage.utilisation:.1%}, median {median_ms:.1f} ms")
    return table


def _stage(records: Sequence[StepRecord], index: int, seconds: float) -> StageSummary:
    spans = [record.stages[index] for record in records if index < len(record.stages)]
    durations = [end - begin for begin, end in spans]
    return StageSummary(utilisation=sum(durations) / seconds, median_s=median(durations))
