"""Findings in a file, so that a process of its own adds a part's, figure by figure."""

from __future__ import annotations

import gc
import json
import statistics
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .floors import DeviceRates, StepTraffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """How long something took, beside its floor.

    group    what stands together in the table
    seconds  median; `least` of all runs
    wall_s   median for a caller that waits for the result; None where that is `seconds`
    order    place within the group in the table
    """

    group: str
    name: str
    seconds: float
    least: float
    work: StepTraffic
    floor_s: float
    bound: str
    wall_s: float | None = None
    note: str = ""
    order: tuple[int, ...] = ()

    @property
    def to_floor(self) -> float:
        """Times the floor."""
        return self.seconds / self.floor_s

    @property
    def achieved(self) -> str:
        """The rate of what bounds it."""
        if self.bound == "bytes":
            return byte_rate(self.work.num_bytes / self.seconds)
        return flop_rate(self.work.flops / self.seconds)

    def fields(self) -> dict[str, Any]:
        """For JSON; times in milliseconds."""
        return {
            "group": self.group,
            "name": self.name,
            "ms": 1e3 * self.seconds,
            "least_ms": 1e3 * self.least,
            "wall_ms": None if self.wall_s is None else 1e3 * self.wall_s,
            "bytes": self.work.num_bytes,
            "flops": self.work.flops,
            "floor_ms": 1e3 * self.floor_s,
            "bound": self.bound,
            "to_floor": self.to_floor,
            "note": self.note,
        }


@dataclass(slots=True)
class Findings:
    """Filled part by part.

    rates    known first; without them nothing has a floor
    on_change  called whenever there is something new
    facts    what is no time beside a floor, by name
    skipped  names by reason
    failed   what went wrong: names by what was said
    """

    rates: DeviceRates | None = None
    figures: list[Figure] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    on_change: Callable[[], None] = lambda: None

    def add(
        self, group: str, name: str, seconds: Sequence[float], work: StepTraffic, *,
        wall: Sequence[float] = (), note: str = "", order: tuple[int, ...] = (),
    ) -> Figure:  # fmt: skip
        """Note a measurement."""
        assert self.rates is not None, "rates are measured first"
        figure = Figure(
            group=group,
            name=name,
            seconds=statistics.median(seconds),
            least=min(seconds),
            work=work,
            floor_s=self.rates.floor_s(work),
            bound=self.rates.bound(work),
            wall_s=statistics.median(wall) if wall else None,
            note=note,
            order=order,
        )
        self.figures.append(figure)
        self.on_change()
        return figure

    def note(self, name: str, fact: dict[str, Any] | str) -> None:
        """Note a fact: its parts, or a text."""
        self.facts[name] = fact
        self.on_change()

    def skip(self, what: str, why: str) -> None:
        """Note what is not measured."""
        self.skipped.setdefault(why, []).append(what)
        self.on_change()

    def fail(self, what: str, why: str) -> None:
        """Note what went wrong."""
        self.failed.setdefault(why, []).append(what)
        self.on_change()

    def find(self, group: str, name: str) -> Figure | None:
        """The figure of that name."""
        same = (one for one in self.figures if (one.group, one.name) == (group, name))
        return next(same, None)

    def attempt(self, what: str, measure: Callable[[], None]) -> bool:
        """Run a part; what goes wrong in it is noted and costs no other part its figures."""
        try:
            measure()
        except (torch.OutOfMemoryError, MemoryError) as error:
            self.skip(what, f"out of memory ({str(error).partition('.')[0]})")
        except Exception as error:  # noqa: BLE001 - a run on a lent GPU must bring back the rest
            # The table has room for a line; whoever mends it needs all of it.
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            self.fail(what, f"{type(error).__name__}: {lines[0]}")
        else:
            return True
        free_memory()
        return False


def byte_rate(per_second: float) -> str:
    """For people."""
    return f"{per_second / 1e9:.{0 if per_second >= 1e11 else 1}f} GB/s"


def flop_rate(per_second: float) -> str:
    """For people."""
    if per_second >= 1e12:
        return f"{per_second / 1e12:.1f} TFLOP/s"
    return f"{per_second / 1e9:.1f} GFLOP/s"


def free_memory() -> None:
    """Give the device back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        # After a fault the GPU takes no calls any more, which the next part will tell.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def save_findings(path: Path, findings: Findings) -> None:
    """Write all of it; whoever reads meanwhile reads the file of before."""
    content = {
        "rates": None if findings.rates is None else asdict(findings.rates),
        "figures": [asdict(figure) for figure in findings.figures],
        "facts": findings.facts,
        "skipped": findings.skipped,
        "failed": findings.failed,
    }
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content))
    beside.replace(path)


def load_findings(path: Path, findings: Findings) -> None:
    """Put what the file holds in `findings`."""
    content = json.loads(path.read_text())
    findings.rates = None if content["rates"] is None else DeviceRates(**content["rates"])
    findings.figures = [_figure(fields) for fields in content["figures"]]
    findings.facts, findings.skipped = content["facts"], content["skipped"]
    findings.failed = content["failed"]


def _figure(fields: dict[str, object]) -> Figure:
    work = StepTraffic(**fields.pop("work"))  # pyright: ignore[reportCallIssue, reportArgumentType]
    order = tuple(fields.pop("order"))  # pyright: ignore[reportArgumentType]
    return Figure(**fields, work=work, order=order)  # pyright: ignore[reportArgumentType]
