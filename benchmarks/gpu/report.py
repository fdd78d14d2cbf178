"""The table for people, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .findings import Figure, Findings
from .goals import Goal

COLUMNS = ("what", "ms", "floor, ms", "x floor", "floor of", "achieved", "")


def print_report(console: Console, findings: Findings, goals: Sequence[Goal]) -> None:
    """Figures, facts, goals, and what is missing."""
    table = Table(title="Medians beside the floor: the least bytes and operations at full rate")
    for column in COLUMNS:
        is_text = column in {"what", "floor of", ""}
        table.add_column(column, justify="left" if is_text else "right")
    groups = list(dict.fromkeys(one.group for one in findings.figures))
    for group in groups:
        table.add_section()
        table.add_row(f"[bold]{escape(group)}")
        members = [one for one in findings.figures if one.group == group]
        for one in sorted(members, key=lambda one: one.order):
            table.add_row(*_cells(one))
    console.print(table)
    for line in _facts(findings):
        console.print(line)
    _print_goals(console, goals)
    for why, names in findings.skipped.items():
        console.print(f"not measured, {escape(why)}: {escape('; '.join(names))}")
    for why, names in findings.failed.items():
        console.print(f"FAILED  {escape(why)}: {escape('; '.join(names))}")


def write_json(path: Path, found: dict[str, Any], findings: Findings, goals: list[Goal]) -> None:
    """Everything that was found, after what `found` holds already."""
    rates = findings.rates
    content = found | {
        "rates": None
        if rates is None
        else {"bytes_per_s": rates.num_bytes, "flops_per_s": rates.flops},
        "goals": [goal.fields() for goal in goals],
        "facts": findings.facts,
        "figures": [figure.fields() for figure in findings.figures],
        "skipped": findings.skipped,
        "failed": findings.failed,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _cells(one: Figure) -> list[str]:
    notes = [one.note] if one.note else []
    if one.wall_s is not None:
        notes.append(f"{1e3 * one.wall_s:.3f} with the wait")
    return [
        escape(one.name),
        _digits(1e3 * one.seconds),
        _digits(1e3 * one.floor_s),
        f"{one.to_floor:.2f}",
        one.bound,
        one.achieved,
        "; ".join(notes),
    ]


def _digits(milliseconds: float) -> str:
    return f"{milliseconds:.3f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _facts(findings: Findings) -> list[str]:
    lines = []
    for name, fact in findings.facts.items():
        if isinstance(fact, str):
            lines.append(f"{name}: {fact}")
        elif "step_ms" in fact:
            lines.append(_host_line(fact))
        elif "tau" in fact:
            lines.append(_demo_line(fact))
        else:
            lines.append(f"{name}: {_short(fact)}")
    return [escape(line) for line in lines]


def _short(fact: dict[str, Any]) -> str:
    values = (
        f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
        for key, value in fact.items()
    )
    return ", ".join(values)


def _host_line(host: dict[str, Any]) -> str:
    busy = host["busy_ms"]
    seen = "the profiler saw no device work"
    if busy is not None:
        seen = f"{busy:.2f} ms of kernels, {host['inside_share']:.1%} gaps between them"
    return (
        f"{host['what']}: {host['step_ms']:.2f} ms a step, {host['ahead_ms']:.2f} launched ahead; "
        f"all is enqueued after {host['enqueue_ms']:.2f} ms and done in {host['span_ms']:.2f} ms; "
        f"{host['device_ms']:.2f} ms on the device where the host is ahead ({seen}), which waits "
        f"for the host for {host['between_share']:.1%} of the step"
    )


def _demo_line(demo: dict[str, Any]) -> str:
    return (
        f"demo model, greedy, float32: {demo['plain_tokens_per_s']:.0f} tokens/s plain, "
        f"{demo['drafted_tokens_per_s']:.0f} with drafts (tau {demo['tau']:.2f}); "
        f"{demo['same_tokens']} of {demo['prompts']} texts are the same"
    )


def _print_goals(console: Console, goals: Sequence[Goal]) -> None:
    table = Table("goal", "wanted", "found", "", title="Goals")
    for goal in goals:
        table.add_row(goal.what, goal.wanted, goal.found or "-", goal.verification_result)
    console.print(table)
