"""What a run says: facts of the device, goals, tables, the roofline and the file."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...measure.report.plots import DPI, MARKERS
from .findings import Figure, Findings, byte_rate, flop_rate
from .floors import DeviceRates
from .measure import attention as measure_attention
from .measure import sampling as measure_sampling
from .plan import GpuPlan


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name, memory and versions of a device."""
    if device.type != "cuda":
        return {"name": platform.machine(), "kind": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "kind": device.type,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "flash_attn": _version("flash-attn"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# Times the floor, times the one-token step, share of the floor's rate, seconds, share of a step.
MOST_TO_FLOOR = 1.20
MOST_TREE_TO_TOKEN = 1.30
LEAST_ATTENTION_SHARE = 0.70
MOST_SAMPLING_S = 200e-6
MOST_IDLE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal; `found` is None where it was not measured."""

    what: str
    wanted: str
    found: str | None
    is_reached: bool

    @property
    def verification_result(self) -> str:
        """For people."""
        if self.found is None:
            return "not measured"
        return "reached" if self.is_reached else "NOT reached"

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def goals(plan: GpuPlan, findings: Findings) -> list[Goal]:
    """All of them, in the order of the table."""
    return [
        *_step_goals(plan, findings),
        *_kernel_goals(plan, findings),
        _idle_goal(plan, findings),
    ]


def _step_goals(plan: GpuPlan, findings: Findings) -> Iterator[Goal]:
    token = findings.find(plan.whole.name, plan.one_token.name)
    tree = findings.find(plan.whole.name, plan.tree.name)
    to_floor = token.to_floor if token else None
    yield _most(f"{plan.whole.name}, {plan.one_token.name}", to_floor, MOST_TO_FLOOR, "x floor")
    ratio = tree.seconds / token.seconds if tree and token else None
    what = f"the same with {plan.tree.nodes} nodes"
    yield _most(what, ratio, MOST_TREE_TO_TOKEN, "x one token")


def _kernel_goals(plan: GpuPlan, findings: Findings) -> Iterator[Goal]:
    case = plan.attention_goal
    attention = findings.find(measure_attention.GROUP, case.name)
    share = 1 / attention.to_floor if attention else None
    yield Goal(
        f"{measure_attention.GROUP}, {case.name}",
        f"at least {LEAST_ATTENTION_SHARE:.0%} of the floor's rate",
        None if share is None else f"{share:.0%}",
        share is not None and share >= LEAST_ATTENTION_SHARE,
    )
    sampled = [one for one in findings.figures if one.group == measure_sampling.GROUP]
    is_whole = len(sampled) == len(measure_sampling.KINDS)
    slowest = max(sampled, key=lambda one: one.seconds) if is_whole else None
    what = f"sampling {plan.sampling_rows} x {plan.sampling_vocab // 1000}k, slowest kind"
    found = None if slowest is None else 1e6 * slowest.seconds
    yield _most(what, found, 1e6 * MOST_SAMPLING_S, "us", digits=0)


def _idle_goal(plan: GpuPlan, findings: Findings) -> Goal:
    host = findings.facts.get(f"host, {plan.whole.name}", {})
    share = host.get("between_share")
    return Goal(
        "idle device between graphs of one-token steps",
        f"under {MOST_IDLE_SHARE:.0%}",
        None if share is None else f"{share:.1%}",
        share is not None and share < MOST_IDLE_SHARE,
    )


def _most(what: str, found: float | None, most: float, unit: str, digits: int = 2) -> Goal:
    return Goal(
        what,
        f"at most {most:.{digits}f} {unit}",
        None if found is None else f"{found:.{digits}f} {unit}",
        found is not None and found <= most,
    )


def write_roofline(findings: Findings, title: str, path: Path) -> None:
    """A PNG of all figures that multiply. Raises `ImportError` where matplotlib is missing."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - plots are optional

    assert findings.rates is not None
    rates = findings.rates
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    shown = [one for one in findings.figures if one.work.flops]
    groups = list(dict.fromkeys(one.group for one in shown))
    for index, group in enumerate(groups):
        points = [one for one in shown if one.group == group]
        axes.plot(
            [one.work.intensity for one in points],
            [one.work.flops / one.seconds / 1e12 for one in points],
            MARKERS[index % len(MARKERS)],
            color=f"C{index % 10}", markersize=5, alpha=0.8, label=group,
        )  # fmt: skip
    lowest = min((one.work.intensity for one in shown), default=1.0) / 2
    highest = max([2 * one.work.intensity for one in shown] + [4 * _ridge(rates)])
    corners = [lowest, _ridge(rates), highest]
    roof = [min(rates.flops, corner * rates.num_bytes) / 1e12 for corner in corners]
    axes.plot(corners, roof, color="black", linewidth=1.2, label=_roof_name(rates), zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations for each byte that must be moved")
    axes.set_ylabel("TFLOP/s achieved")
    axes.set_title(title, fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def _ridge(rates: DeviceRates) -> float:
    """Where both roofs meet."""
    return rates.flops / rates.num_bytes


def _roof_name(rates: DeviceRates) -> str:
    return f"{byte_rate(rates.num_bytes)}, {flop_rate(rates.flops)} measured"


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
