"""A soak's results, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.table import Table

from ....measure.records.record import machine
from ..on_ray.processes import Process
from .faults import Done
from .run import Found, Served, Setting
from .setup import settings_of

LIBRARIES = ("draftline", "ray", "redis", "httpx")


def report_of(setting: Setting, found: Found, load_before: Sequence[float]) -> dict[str, Any]:
    """All that is kept of it."""
    verdict, served = found.verdict, found.served
    return {
        "command": "python -m draftline.benchmarks.serving.soak "
        f"--minutes {setting.minutes:g} --requests {setting.requests} "
        f"--fault-s {setting.fault_s:g} --seed {setting.seed} "
        f"--replicas {setting.replicas} --stages {setting.stages}",
        "machine": machine().fields(),
        "versions": {name: metadata.version(name) for name in LIBRARIES},
        "load_average_before": load_before,
        "settings": settings_of(
            "redis://",
            ["host:port"],
            setting.replicas,
            setting.stages,
            model_drafters=setting.model_drafters,
        ),
        "seconds": found.seconds,
        "faults": _faults(served.faults),
        "ends": verdict.ends,
        "kinds": _kinds(found),
        "tokens_compared": verdict.tokens,
        "interrupted_streams": verdict.interrupted,
        "resumed_with_the_right_text": verdict.resumed,
        "counters": served.counters,
        "slowest_s": verdict.slowest_s,
        "errors": verdict.errors,
        "engines_at_the_end": None if served.holdings is None else asdict(served.holdings),
        "processes": {
            "before": _by_role(served.before),
            "after": _by_role(served.after),
        },
        "time_line": _time_line(served),
        "not_right": _not_right(found),
        "problems": found.problems,
    }


def print_report(report: dict[str, Any]) -> None:
    """The same as tables."""
    console = Console()
    table = Table("fault", "times", "not met", box=None)
    for name, counts in report["faults"].items():
        table.add_row(name, str(counts["made"]), str(counts["not_met"]))
    console.print(table)
    table = Table("requests", "", box=None)
    for name, count in sorted(report["ends"].items()):
        table.add_row(name, str(count))
    for name in ("interrupted_streams", "resumed_with_the_right_text", "tokens_compared"):
        table.add_row(name.replace("_", " "), str(report[name]))
    console.print(table)
    for problem in report["problems"] or ["no problem was found"]:
        console.print(problem, markup=False)


def _faults(faults: Sequence[Done]) -> dict[str, dict[str, int]]:
    made: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for done in faults:
        name = f"{done.fault.victim} {done.fault.action}"
        (missed if done.pid is None else made)[name] += 1
    return {
        name: {"made": made[name], "not_met": missed[name]} for name in sorted({*made, *missed})
    }


def _time_line(served: Served) -> list[str]:
    """The faults in order, with seconds from the first request."""
    return [
        f"{done.began_at - served.began_at:.1f} {done.fault.victim} {done.fault.action} "
        f"pid {done.pid}, over at {done.ended_at - served.began_at:.1f}"
        for done in sorted(served.faults, key=lambda done: done.began_at)
    ]


def _not_right(found: Found) -> list[dict[str, Any]]:
    """Requests that ended otherwise than they should, but for those whose clients left."""
    began_at = found.served.began_at
    return [
        {
            "kind": one.ask.kind,
            "path": one.ask.path,
            "stream": one.ask.body["stream"],
            "id": one.answer.response_id,
            "sent_s": round(one.answer.began_at - began_at, 2),
            "ended_s": round(one.answer.ended_at - began_at, 2),
            "tokens": one.answer.num_tokens,
            "end": one.end,
            "detail": one.answer.detail,
            "was_resumed": one.was_resumed,
            "wrong": one.wrong,
        }
        for one in found.outcomes
        if one.wrong is not None or one.end not in ("whole", "left")
    ]


def _kinds(found: Found) -> dict[str, dict[str, int]]:
    """Requests by what they asked for, and how they ended."""
    kinds: dict[str, Counter[str]] = {}
    for one in found.outcomes:
        kinds.setdefault(one.ask.kind, Counter())[one.end] += 1
    return {name: dict(counts) for name, counts in sorted(kinds.items())}


def _by_role(processes: Sequence[Process]) -> dict[str, dict[str, int]]:
    """Of each role: how many processes, and the most that one of them holds."""
    roles: dict[str, list[Process]] = {}
    for process in processes:
        roles.setdefault(process.role, []).append(process)
    return {
        role: {
            "processes": len(ones),
            "threads": max(one.threads for one in ones),
            "fds": max(one.fds for one in ones),
        }
        for role, ones in sorted(roles.items())
    }
