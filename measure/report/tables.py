"""The tables that `draftline bench` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..records import Latency, SpecCounts
from ..runs.matched import Difference
from .summary import BenchResult, Interval, Summary, TauRow

NONE = "-"
SHOWN_POSITIONS = 8
MIN_WIDTH = 150
SHOWN_DIFFERENCES = 20


def print_result(result: BenchResult, console: Console) -> None:
    """Print tables of speed, latencies and acceptance, and every answer that differs."""
    # Narrower terminals break lines more readably than the tables' cells.
    console.width = max(console.width, MIN_WIDTH)
    summaries = result.summaries
    console.print(_speed(summaries))
    console.print(_latencies(summaries))
    drafted = [
        summary for summary in summaries if summary.whole.counts and summary.whole.counts.drafted
    ]
    if drafted:
        console.print(_acceptance(drafted, result.draft_ms))
    if result.draft_lengths:
        console.print(_kappas(result))
    if len(result.taus) > 1:
        console.print(_taus(result.taus))
    if result.differences is not None:
        console.print(_equality(result.differences))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _speed(summaries: Iterable[Summary]) -> Table:
    table = _table(
        "Speed: medians over rounds (least - most)",
        "setting", "output tok/s", "", "speedup", "", "tau", "Mac-TP",
        "Mic-TP", "same answers",
    )  # fmt: skip
    for summary in summaries:
        whole = summary.whole
        table.add_row(
            summary.name,
            f"{summary.rate:.1f}",
            f"({min(summary.rates):.1f} - {max(summary.rates):.1f})",
            f"{summary.speedup:.2f}x",
            f"({min(summary.speedups):.2f} - {max(summary.speedups):.2f})",
            f"{whole.counts.tau:.2f}" if whole.counts else NONE,
            f"{whole.mac_tp:.1f}" if whole.mac_tp else NONE,
            f"{whole.mic_tp:.1f}",
            f"{summary.same} of {whole.num_requests}",
        )
    return table


def _latencies(summaries: Iterable[Summary]) -> Table:
    table = _table(
        "Latency, ms: mean / median / P99 over all rounds",
        "setting", "TTFT", "TPOT", "ITL", "E2EL",
    )  # fmt: skip
    for summary in summaries:
        whole = summary.whole
        parts = (whole.ttft, whole.tpot, whole.itl, whole.e2el)
        table.add_row(summary.name, *map(_milliseconds, parts))
    return table


def _milliseconds(latency: Latency | None) -> str:
    if latency is None:
        return NONE
    values = (latency.mean, latency.median, latency.p99)
    return " / ".join(f"{1000 * value:.1f}" for value in values)


def _acceptance(summaries: Iterable[Summary], draft_ms: Mapping[str, Mapping[str, float]]) -> Table:
    table = _table(
        "Acceptance: nodes by source, and share of steps that accepted one at depth 0, 1, ...",
        "setting", "rate", "accepted / drafted by source", "ms a draft", "by position",
    )  # fmt: skip
    table.columns[2].justify = table.columns[4].justify = "left"
    for summary in summaries:
        counts = summary.whole.counts
        assert counts is not None
        shares = [f"{share:.2f}" for share in counts.by_position[:SHOWN_POSITIONS]]
        more = " ..." if len(counts.by_position) > SHOWN_POSITIONS else ""
        table.add_row(
            summary.name, f"{counts.acceptance_rate:.0%}", _sources(counts),
            _draft_times(counts, draft_ms.get(summary.name, {})), " ".join(shares) + more,
        )  # fmt: skip
    return table


def _kappas(result: BenchResult) -> Table:
    table = _table(
        "kappa: accepted draft tokens a step, times draft length / draft tokens a step; "
        "theta: kappa / speedup",
        "setting", "kappa", "theta",
    )  # fmt: skip
    for summary in result.summaries:
        kappa, theta = result.kappa(summary), result.theta(summary)
        if kappa is not None and theta is not None:
            table.add_row(summary.name, f"{kappa:.2f}", f"{theta:.2f}")
    return table


def _taus(rows: Sequence[TauRow]) -> Table:
    table = _table(
        "tau: 95 % intervals by bootstrap over prompts, the same draws for all settings",
        "setting", "tau", "", "over the row above", "", "", *rows[0].by_category,
    )  # fmt: skip
    for row in rows:
        above = ("", "", "")
        if row.difference is not None:
            above = (*_interval(row.difference, "+"), row.difference.verdict)
        parts = [f"{one.value:.2f} {_ends(one)}" for one in row.by_category.values()]
        table.add_row(row.name, *_interval(row.tau), *above, *parts)
    return table


def _interval(interval: Interval, sign: str = "") -> tuple[str, str]:
    return f"{interval.value:{sign}.2f}", _ends(interval, sign)


def _ends(interval: Interval, sign: str = "") -> str:
    between = "to" if sign else "-"
    return f"({interval.low:{sign}.2f} {between} {interval.high:{sign}.2f})"


def _sources(counts: SpecCounts) -> str:
    parts = [
        f"{name} {counts.accepted.get(name, 0):,} / {drafted:,}"
        for name, drafted in counts.drafted.items()
    ]
    return "\n".join(parts)


def _draft_times(counts: SpecCounts, times: Mapping[str, float]) -> str:
    return "\n".join(f"{times[name]:.2f}" if name in times else NONE for name in counts.drafted)


def _equality(differences: Sequence[Difference]) -> Group | str:
    if not differences:
        return "all answers are the same under every setting"
    lines = [Text(str(difference)) for difference in differences[:SHOWN_DIFFERENCES]]
    left = len(differences) - len(lines)
    if left:
        lines.append(Text(f"... and {left} more, in the JSON"))
    num_faults = sum(difference.is_fault for difference in differences)
    if num_faults:
        head = f"[bold red]ANSWERS DIFFER: {num_faults} differences[/]"
    else:
        head = f"[bold yellow]{len(differences)} differences, all at near-ties[/]"
    return Group(head, *lines)
