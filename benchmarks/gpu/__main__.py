"""How near a stage is to what its GPU can do: one run of at most eight minutes on one GPU.

    python -m draftline.benchmarks.gpu [--parts attention,steps] [--seconds 400]
    python -m draftline.benchmarks.gpu --device cpu --tiny      # every line, no GPU, no meaning

Measures the device's bandwidth and its rate of products first; then attention and sampling alone,
steps of random weights in the shapes of Llama-3-8B and of a stage of a 70B, what the host adds,
and the bundled model end to end. Every time stands beside its floor: the least bytes and
operations at the measured rates. Prints a table, writes JSON after every figure and a roofline
plot. Each part has a process of its own, which ends when it hangs. Needs no network, Ray, Redis or
gRPC; `scripts/from_source.sh python -m ...` needs no install, either.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from transformers.utils import logging as transformers_logging

from ...core.errors import ConfigError
from ...kernels.dispatch import Machine as AttentionMachine
from ...kernels.dispatch import choose_attention
from ...measure.records import machine
from .findings import Findings
from .instruments.clock import TimeBudget
from .parts import PARTS, Part, PartProcesses, RunPart, SettingFacts, measure_all, run_here
from .plan import FULL_PLAN, TINY_PLAN
from .report import device_facts, goals, print_report, write_json, write_roofline
from .setting import DTYPE

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
TINY_RESULTS = ROOT / "build" / "gpu-tiny.json"
NEEDED = "needs a GPU that torch sees; --device cpu --tiny tries every line without one"


def main(
    *,
    device: Annotated[str, typer.Option(help="cuda, or cpu with --tiny.")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny shapes, to try every line.")] = False,
    parts: Annotated[
        str, typer.Option(help=f"Of {', '.join(PARTS)}, with commas between; rates are always one.")
    ] = ",".join(PARTS),
    together: Annotated[
        bool, typer.Option("--together", help="All parts in this process, without limits.")
    ] = False,
    part_seconds: Annotated[
        float | None,
        typer.Option(help="A part's process ends after them; default: 240, with --tiny 1800."),
    ] = None,
    attention: Annotated[str, typer.Option(help="Backend of attention.")] = "auto",
    block_size: Annotated[int, typer.Option(help="KV slots a block.")] = 16,
    seconds: Annotated[float, typer.Option(help="Nothing is begun after them.")] = 400,
    output: Annotated[
        Path | None,
        typer.Option(help="JSON; default: benchmarks/results/gpu.json, --tiny: build/."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG; default: beside the JSON.")] = None,
) -> None:
    """Measure a GPU and draftline on it. Exits 1 if a part failed, 2 without a GPU."""
    where, wanted = _checked(device, tiny=tiny), _parts(parts)
    try:
        choose_attention(AttentionMachine.of(where), DTYPE, block_size, attention)
    except ConfigError as error:
        _refuse(str(error))
    transformers_logging.disable_progress_bar()
    facts = SettingFacts(str(where), tiny, attention, block_size, seconds, time.monotonic())
    run = GpuRun(facts, output or (TINY_RESULTS if tiny else RESULTS))
    if together:
        run.together(wanted)
    else:
        # Where loops are compiled and kernels interpreted, nothing is quick.
        run.apart(wanted, part_seconds or (1800 if tiny else 240))
    run.show(Console(width=130, highlight=False), plot)
    if run.findings.failed:
        raise typer.Exit(1)


class GpuRun:
    """One measurement of a device, which is kept in `path` as it goes."""

    def __init__(self, facts: SettingFacts, path: Path) -> None:
        self.findings = Findings()
        self._facts = facts
        self._path = path
        self._plan = TINY_PLAN if facts.is_tiny else FULL_PLAN
        self._budget = TimeBudget(facts.seconds, start=facts.start)
        self._device = device_facts(torch.device(facts.device))

    def together(self, parts: Sequence[str]) -> None:
        """Measure these parts in this process."""
        self.findings.on_change = self._keep
        self._measure(parts, run_here(self._facts.setting()))

    def apart(self, parts: Sequence[str], limit_s: float) -> None:
        """Measure each of these parts in a process of its own, which ends after `limit_s`."""
        with TemporaryDirectory() as folder:
            processes = PartProcesses(self._facts, Path(folder) / "findings.json", limit_s)

            def run_apart(name: str, part: Part, findings: Findings) -> None:
                processes.run(name, part, findings, self._keep)

            self._measure(parts, run_apart)

    def show(self, console: Console, plot: Path | None) -> None:
        """Print the report, and write the roofline to `plot`, or beside the figures."""
        print_report(console, self.findings, goals(self._plan, self.findings))
        name = self._device["name"]
        if self.findings.rates is not None:
            plot_if_possible(self.findings, name, plot or self._path.with_suffix(".png"))
        console.print(f"{name}; {machine().line()}")

    def _measure(self, parts: Sequence[str], run: RunPart) -> None:
        def after_each(part: str) -> None:
            self._keep()
            print(f"measured: {part}", flush=True)

        measure_all(parts, self._budget, self.findings, run, after_each)

    def _keep(self) -> None:
        """At once: whatever ends the process later, it was measured."""
        about: dict[str, Any] = {
            "machine": machine().fields(),
            "device": self._device,
            "block_size": self._facts.block_size,
            "is_tiny": self._facts.is_tiny,
        }
        write_json(self._path, about, self.findings, goals(self._plan, self.findings))


def _checked(device: str, *, tiny: bool) -> torch.device:
    if device.partition(":")[0] not in ("cuda", "cpu"):
        _refuse(f"--device must be cuda or cpu, not {device}")
    where = torch.device(device)
    is_missing = not torch.cuda.is_available() if where.type == "cuda" else not tiny
    if is_missing:
        _refuse(NEEDED)
    return where


def _parts(parts: str) -> list[str]:
    wanted = [name.strip() for name in parts.split(",")]
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        _refuse(f"--parts must be of {', '.join(PARTS)}, not {', '.join(unknown)}")
    return wanted


def _refuse(why: str) -> NoReturn:
    typer.echo(why, err=True)
    raise typer.Exit(2)


def plot_if_possible(findings: Findings, device: str, path: Path) -> None:
    """Write the roofline, or a line that says what it needs."""
    try:
        write_roofline(findings, f"{device}: achieved and possible", path)
    except ImportError:
        print("no plot: it needs matplotlib, pip install 'draftline[bench]'")


if __name__ == "__main__":
    typer.run(main)
