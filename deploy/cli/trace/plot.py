"""Draws a step trace: one lane for each stage, the drafters and the coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ....core.arrays import Span
from ....core.errors import ConfigError
from ....core.step.trace import StepRecord
from .bars import Bar
from .flights import flight_lanes
from .summary import KINDS, TraceSummary, kind_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = {
    "prompt": "#E69F00",
    "tree": "#56B4E9",
    "slice": "#0072B2",
    "killed": "#BBBBBB",
    "mixed": "#009E73",
    "waiting for drafters": "#CC79A7",
    "planning and building": "#D55E00",
    "committing": "#404040",
    "drafting": "#332288",
    "drafting ahead": "#F0E442",
}
BAR_HEIGHT = 0.72
FIGURE_WIDTH = 16.0
# A digit of a step id, in inches: a bar that is shorter than its label goes without one.
DIGIT_WIDTH = 0.07
MAX_STEPS = 2000
# When drafters worked, by the names that `COLOURS` has for it; wall-clock seconds.
Drafts = Mapping[str, Sequence[Span]]
NO_DRAFTS: Drafts = MappingProxyType({})
DRAFTS = ("drafting", "drafting ahead")


def draw_trace(
    records: Sequence[StepRecord],
    summary: TraceSummary,
    png: Path,
    drafts: Drafts = NO_DRAFTS,
    request: int | None = None,
) -> None:
    """Write the timeline of these steps, in order, as a PNG; `drafts` get a lane of their own, and
    so does each flight of a streamed `request`.

    Raises `ConfigError` where matplotlib is missing, the file cannot be written, or the steps are
    too many to be told apart.
    """
    if len(records) > MAX_STEPS:
        raise ConfigError(
            "to-step",
            f"{len(records)} steps are too many for one picture; choose at most {MAX_STEPS} with "
            "--from-step and --to-step",
        )
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            "output", "drawing needs matplotlib: pip install 'draftline[bench]'"
        ) from error
    lanes = _lanes(records, drafts)
    if request is not None:
        lanes |= flight_lanes(records, request)
    figure = Figure(figsize=(FIGURE_WIDTH, 2.2 + 0.62 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for height, bars in enumerate(lanes.values()):
        _draw_lane(axes, height, bars, summary.seconds)
    _label_axes(axes, list(lanes), summary, drafts)
    figure.suptitle(_title(summary), x=0.01, ha="left", fontsize=11)
    try:
        figure.savefig(png, dpi=110)
    except OSError as error:
        raise ConfigError("output", f"cannot write {png}: {error.strerror}") from error


def _lanes(records: Sequence[StepRecord], drafts: Drafts) -> dict[str, list[Bar]]:
    """Bars of every lane, by the lane's name, top to bottom."""
    start = records[0].planned_at
    drafters, coordinator = list[Bar](), list[Bar]()
    stages: dict[str, list[Bar]] = {}
    for record in records:
        asked = record.planned_at - start
        drafted = asked + record.draft_wait_s
        if record.draft_wait_s:
            drafters.append(Bar(asked, record.draft_wait_s, "waiting for drafters"))
        planning = record.submitted_at - start - drafted
        coordinator.append(Bar(drafted, planning, "planning and building"))
        committing = record.committed_at - record.answered_at
        coordinator.append(Bar(record.answered_at - start, committing, "committing"))
        for index, (begin, end) in enumerate(record.stages):
            bar = Bar(begin - start, end - begin, kind_of(record), str(record.step))
            stages.setdefault(f"stage {index}", []).append(bar)
    at_work = [
        Bar(begin - start, end - begin, kind)
        for kind, spans in drafts.items()
        for begin, end in spans
    ]
    own = {"at work": at_work} if at_work else {}
    return {"drafters": drafters, **own, "coordinator": coordinator, **stages}


def _draw_lane(axes: Axes, height: int, bars: Sequence[Bar], seconds: float) -> None:
    axes.broken_barh(
        [(1e3 * bar.begin, 1e3 * bar.length) for bar in bars],
        (height - BAR_HEIGHT / 2, BAR_HEIGHT),
        facecolors=[COLOURS[bar.kind] for bar in bars],
        # A white rim parts steps that follow one another; it would hide the thinnest bars.
        edgecolors="white" if any(bar.label for bar in bars) else "face",
        linewidth=0.3,
    )
    inches_a_second = 0.9 * FIGURE_WIDTH / seconds
    for bar in bars:
        if bar.label and bar.length * inches_a_second > DIGIT_WIDTH * (len(bar.label) + 1):
            middle = 1e3 * (bar.begin + bar.length / 2)
            axes.text(middle, height, bar.label, ha="center", va="center", fontsize=8)


def _label_axes(axes: Axes, names: Sequence[str], summary: TraceSummary, drafts: Drafts) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    busy = {f"stage {index}": stage.utilisation for index, stage in enumerate(summary.stages)}
    labels = [f"{name}\n{busy[name]:.0%} busy" if name in busy else name for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * summary.seconds)
    axes.set_xlabel("milliseconds since the planning of the first step; gaps are idle time")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    absent = {name for name in DRAFTS if name not in drafts}
    absent |= {name for name in KINDS if not summary.kinds[name]}
    if not any(name.startswith("flight") for name in names):
        absent.add("killed")
    shown = [name for name in COLOURS if name not in absent]
    names_of = {name: f"{name} step" if name in KINDS else name for name in shown}
    patches = [Patch(facecolor=COLOURS[name], label=names_of[name]) for name in shown]
    axes.legend(
        handles=patches, loc="lower right", bbox_to_anchor=(1, 1.01), ncols=len(patches),
        frameon=False, borderaxespad=0, fontsize=9,
    )  # fmt: skip


def _title(summary: TraceSummary) -> str:
    stages = ", ".join(f"{stage.utilisation:.0%}" for stage in summary.stages)
    return (
        f"Steps {summary.first} to {summary.last}: {1e3 * summary.seconds:.0f} ms, "
        f"stages busy {stages or 'unknown'}, {summary.mean_rows:.1f} rows a step, "
        f"tau {summary.tau:.2f}, waiting for drafters {summary.draft_wait:.0%}"
    )
