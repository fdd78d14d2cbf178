"""Tables of a comparison: for a terminal, and in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from ....measure.records.run_metrics import Latency
from .ratios import Ratio, best_setting, least, plain_to_vllm, to_best_peer
from .runs import OUR_PLAIN, Comparison, PeerRun

NOTHING = "-"
RATIOS = {
    "draftline, default / best peer": to_best_peer,
    "draftline, best setting / best peer": best_setting,
    "draftline, plain / vLLM, plain": plain_to_vllm,
}


def same_answers(comparison: Comparison, run: PeerRun) -> tuple[int, int] | None:
    """Answers that read as those of draftline without drafters, same round, and how many."""
    base = comparison.cell(run.prompts, run.streams).get(OUR_PLAIN, {}).get(run.round)
    if base is None:
        return None
    same = sum(a == b for a, b in zip(run.answers, base.answers, strict=True))
    return same, len(run.answers)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """One table a set of prompts, and the ratios; latencies are medians over rounds."""
    for label in comparison.labels:
        table = Table(title=f"{label}: greedy, float32; medians over rounds", box=None)
        table.add_column("server")
        for title in (
            "streams", "tok/s", "(least - most)", "TTFT ms", "p99", "ITL ms", "p99", "CPU ms/tok",
            "tau", "same",
        ):  # fmt: skip
            table.add_column(title, justify="right")
        for streams in comparison.loads:
            cell = comparison.cell(label, streams)
            for name in comparison.servers:
                if name in cell:
                    runs = list(cell[name].values())
                    table.add_row(name, str(streams), *_figures(comparison, runs))
        console.print(table)
        _print_ratios(comparison, label, console)


def _figures(comparison: Comparison, runs: Sequence[PeerRun]) -> list[str]:
    rates = [run.rate for run in runs]
    return [
        f"{statistics.median(rates):.1f}",
        f"({min(rates):.1f} - {max(rates):.1f})",
        *ttft(runs).split(" / "),
        *itl(runs).split(" / "),
        cpu(runs),
        f"{statistics.median(run.tau for run in runs):.2f}",
        same(comparison, runs),
    ]


def _print_ratios(comparison: Comparison, label: str, console: Console) -> None:
    for title, ratio in RATIOS.items():
        found = {streams: ratio(comparison, label, streams) for streams in comparison.loads}
        lowest = least(list(found.values()))
        if lowest is None:
            continue
        parts = ", ".join(f"{streams}: {shown(one)}" for streams, one in found.items() if one)
        console.print(f"{label}: {title}: least {lowest:.2f} ({parts})")


def shown(ratio: Ratio | None) -> str:
    """A median with its least and most, where there are several rounds."""
    if ratio is None:
        return NOTHING
    low, high = ratio.spread
    spread = f" ({low:.2f}-{high:.2f})" if len(ratio.rounds) > 1 else ""
    return f"{ratio.median:.2f}{spread}"


def rate(runs: Sequence[PeerRun]) -> str:
    """Tokens a second of all streams, the median of rounds."""
    return f"{statistics.median(run.rate for run in runs):.0f}"


def ttft(runs: Sequence[PeerRun]) -> str:
    """Milliseconds to the first token, p50 / p99, each the median of rounds."""
    return _latency([run.ttft for run in runs if run.ttft is not None])


def itl(runs: Sequence[PeerRun]) -> str:
    """Milliseconds between parts of a stream, p50 / p99, each the median of rounds."""
    return _latency([run.itl for run in runs if run.itl is not None])


def _latency(rounds: Sequence[Latency]) -> str:
    if not rounds:
        return f"{NOTHING} / {NOTHING}"
    middle = statistics.median(one.median for one in rounds)
    high = statistics.median(one.p99 for one in rounds)
    return f"{1e3 * middle:.1f} / {1e3 * high:.1f}"


def cpu(runs: Sequence[PeerRun]) -> str:
    """Processor milliseconds a token."""
    known = [run.cpu_ms_per_token for run in runs if run.cpu_ms_per_token is not None]
    return f"{statistics.median(known):.2f}" if known else NOTHING


def same(comparison: Comparison, runs: Sequence[PeerRun]) -> str:
    """Equal answers of all rounds."""
    known = [one for one in (same_answers(comparison, run) for run in runs) if one is not None]
    if not known:
        return NOTHING
    return f"{sum(one for one, _ in known)} of {sum(count for _, count in known)}"


def markdown_rates(comparison: Comparison) -> str:
    """A table a set of prompts: tokens a second by server and streams, ratios below."""
    parts = []
    for label in comparison.labels:
        rows = _rows(comparison, label, rate)
        for title, ratio in RATIOS.items():
            found = [ratio(comparison, label, streams) for streams in comparison.loads]
            if any(found):
                rows.append([f"**{title}**", *map(shown, found)])
        parts.append(_markdown(f"{label}, tokens/s", comparison.loads, rows))
    return "\n\n".join(parts)


def _rows(
    comparison: Comparison, label: str, figure: Callable[[Sequence[PeerRun]], str]
) -> list[list[str]]:
    cells = [comparison.cell(label, streams) for streams in comparison.loads]
    return [
        [name, *(figure(list(cell[name].values())) if name in cell else NOTHING for cell in cells)]
        for name in comparison.servers
        if any(name in cell for cell in cells)
    ]


def _markdown(title: str, loads: Iterable[int], rows: Iterable[Sequence[str]]) -> str:
    heads = [f"{count} stream{'s' if count > 1 else ''}" for count in loads]
    lines = [[title, *heads], ["---"] * (len(heads) + 1), *rows]
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in lines)
        .replace("| --- ", "|---")
        .replace("|--- |", "|---|")
    )
