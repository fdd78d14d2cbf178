"""How near a stage is to what its GPU can do: one run of at most eight minutes on one GPU.

    python -m draftline.benchmarks.gpu [--attention auto] [--seconds 400]
    python -m draftline.benchmarks.gpu --device cpu --tiny      # every line, no GPU, no meaning

Measures the device's bandwidth and its rate of products first; then attention and sampling alone,
steps of random weights in the shapes of Llama-3-8B and of a stage of a 70B, what the host adds,
and the bundled model end to end. Every time stands beside its floor: the least bytes and
operations at the measured rates. Prints a table, writes JSON and a roofline plot. Needs no network,
Ray, Redis or gRPC.
"""

from __future__ import annotations

from pathlib import Path
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
from .instruments.clock import Clock, Repeats, TimeBudget
from .instruments.roofline import write_roofline
from .parts import measure_all
from .plan import FULL_PLAN, TINY_PLAN
from .report import print_report, write_json
from .setting import DTYPE, Setting

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
TINY_RESULTS = ROOT / "build" / "gpu-tiny.json"
NEEDED = "needs a GPU that torch sees; --device cpu --tiny tries every line without one"
TINY_REPEATS = Repeats(warm=1, least=3, most=5, seconds=0.05)


def main(  # noqa: PLR0913 - one parameter a flag
    *,
    device: Annotated[str, typer.Option(help="cuda, or cpu with --tiny.")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny shapes, to try every line.")] = False,
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
    where = _checked(device, tiny=tiny)
    try:
        choose_attention(AttentionMachine.of(where), DTYPE, block_size, attention)
    except ConfigError as error:
        _refuse(str(error))
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    setting = Setting(
        plan=TINY_PLAN if tiny else FULL_PLAN,
        clock=Clock(where, TINY_REPEATS if tiny else Repeats()),
        budget=TimeBudget(seconds),
        attention=attention,
        block_size=block_size,
    )
    path = output or (TINY_RESULTS if tiny else RESULTS)
    about: dict[str, Any] = {
        "machine": machine().fields(),
        "device": device_facts(where),
        "block_size": block_size,
        "is_tiny": tiny,
    }
    findings = Findings()

    def after_each(part: str) -> None:
        # Kept at once: whatever ends the process later, it was measured.
        write_json(path, about, findings, goals(setting.plan, findings))
        print(f"measured: {part}", flush=True)

    measure_all(setting, findings, after_each)
    console = Console(width=130, highlight=False)
    print_report(console, findings, goals(setting.plan, findings))
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
    if where.index is not None and where.type == "cuda":
        # Streams, events and launches of Triton are those of the current device.
        torch.cuda.set_device(where)
    return where


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
