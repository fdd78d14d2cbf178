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
from ...measure.records.record import machine
from .device_facts import device_facts
from .findings import Findings
from .goals import goals
from .instruments.clock import TimeBudget
from .instruments.roofline import write_roofline
from .part_process import PartProcesses, SettingFacts
from .parts import PARTS, Part, measure_all, run_here
from .plan import FULL_PLAN, TINY_PLAN
from .report import print_report, write_json
from .setting import DTYPE

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
TINY_RESULTS = ROOT / "build" / "gpu-tiny.json"
NEEDED = "needs a GPU that torch sees; --device cpu --tiny tries every line without one"


def main(  # noqa: PLR0913 - one parameter a flag
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
    plan = TINY_PLAN if tiny else FULL_PLAN
    path = output or (TINY_RESULTS if tiny else RESULTS)
    about: dict[str, Any] = {
        "machine": machine().fields(),
        "device": device_facts(where),
        "block_size": block_size,
        "is_tiny": tiny,
    }
    findings = Findings()

    def keep() -> None:
        # At once: whatever ends the process later, it was measured.
        write_json(path, about, findings, goals(plan, findings))

    def after_each(part: str) -> None:
        keep()
        print(f"measured: {part}", flush=True)

    budget = TimeBudget(seconds, start=facts.start)
    # Where loops are compiled and kernels interpreted, nothing is quick.
    limit = part_seconds or (1800 if tiny else 240)
    with TemporaryDirectory() as folder:
        processes = PartProcesses(facts, Path(folder) / "findings.json", limit)

        def run_apart(name: str, part: Part, findings: Findings) -> None:
            processes.run(name, part, findings, keep)

        if together:
            findings.on_change = keep
        run = run_here(facts.setting()) if together else run_apart
        measure_all(wanted, budget, findings, run, after_each)
    console = Console(width=130, highlight=False)
    print_report(console, findings, goals(plan, findings))
    if findings.rates is not None:
        plot_if_possible(findings, about["device"]["name"], plot or path.with_suffix(".png"))
    console.print(f"{about['device']['name']}; {machine().line()}")
    if findings.failed:
        raise typer.Exit(1)


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
