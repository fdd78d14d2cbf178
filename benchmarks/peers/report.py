"""The one table of the comparison, and its JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from .measure import InProcess, Measured

BASE = "draftline, plain"


@dataclass(slots=True)
class Rows:
    """Rounds by name and number of streams: of servers, and of this process."""

    servers: dict[tuple[str, int], list[Measured]] = field(default_factory=dict)
    in_process: dict[tuple[str, int], list[InProcess]] = field(default_factory=dict)

    def add_server(self, name: str, streams: int, measured: Measured) -> None:
        """One round of a server."""
        self.servers.setdefault((name, streams), []).append(measured)

    def add_in_process(self, name: str, batch: int, run: InProcess) -> None:
        """One round in this process, so many prompts at a time."""
        self.in_process.setdefault((name, batch), []).append(run)

    def same(self, name: str, streams: int) -> int | None:
        """Answers of the first round that read as draftline's own without drafters, alone."""
        base = self.servers.get((BASE, streams))
        if base is None:
            return None
        texts = self.servers[name, streams][0].texts
        return sum(a == b for a, b in zip(texts, base[0].texts, strict=True))


def print_table(rows: Rows, console: Console) -> None:
    """Medians over rounds; latencies are those of the median request, the median over rounds."""
    table = Table(title="Greedy, float32; medians over rounds", box=None, pad_edge=False)
    table.add_column("what")
    for title in ("streams", "tok/s", "(least - most)", "TTFT ms", "TPOT ms", "tau", "same text"):
        table.add_column(title, justify="right")
    for (name, streams), rounds in sorted(rows.servers.items(), key=lambda item: item[0][1]):
        rates = [one.metrics.output_throughput for one in rounds]
        ttft = statistics.median(one.metrics.ttft.median for one in rounds)
        tpot = [one.metrics.tpot.median for one in rounds if one.metrics.tpot is not None]
        same = rows.same(name, streams)
        table.add_row(
            name,
            str(streams),
            *_rates(rates),
            f"{1000 * ttft:.1f}",
            f"{1000 * statistics.median(tpot):.1f}" if tpot else "-",
            f"{statistics.median(one.tau for one in rounds):.2f}",
            "-" if same is None else f"{same} of {len(rounds[0].texts)}",
        )
    for (name, batch), runs in rows.in_process.items():
        tau = f"{statistics.median(run.tau for run in runs):.2f}"
        table.add_row(name, str(batch), *_rates([run.rate for run in runs]), "-", "-", tau, "-")
    console.print(table)


def fields(rows: Rows, what: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but the texts, for JSON."""
    servers = [
        {
            "name": name,
            "streams": streams,
            "same_text": rows.same(name, streams),
            "rounds": [{"tau": one.tau, **asdict(one.metrics)} for one in rounds],
        }
        for (name, streams), rounds in rows.servers.items()
    ]
    local = [
        {
            "name": name,
            "batch": batch,
            "rates": [run.rate for run in runs],
            "tau": [run.tau for run in runs],
        }
        for (name, batch), runs in rows.in_process.items()
    ]
    return {**what, "servers": servers, "in_process": local}


def _rates(rates: list[float]) -> tuple[str, str]:
    return f"{statistics.median(rates):.1f}", f"({min(rates):.1f} - {max(rates):.1f})"
