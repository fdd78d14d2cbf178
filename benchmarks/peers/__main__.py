"""draftline beside transformers and vLLM: same prompts, model, threads and client.

    python -m draftline.benchmarks.peers [--install] [--rounds 3] [--num-prompts 16] [--tokens 128]

Greedy, float32, no prefix shared, and no prompt twice: some draft from earlier answers. Every
server answers through its OpenAI endpoint, streamed to the client of `draftline bench`, at each
number of streams; only one runs at a time, and each round starts them all anew. transformers runs
in this process, as many prompts together as there are streams. Prints a table and writes
benchmarks/results/peers.json. `--install` first makes vLLM's environment with pip, in build/.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from rich.console import Console

from ...core.errors import DraftlineError
from ...deploy.cli.bench.prompts import bench_prompts
from ...measure.records.record import machine
from ...measure.runs.matched import Plan
from .environment import PeerEnvironment
from .measure import Plans, make_plans, measure_server, measure_transformers
from .report import Rows, fields, print_table
from .servers import (
    DRAFTER,
    DRAFTERS,
    TARGET,
    VLLM_SPECULATION,
    ServerSpec,
    draftline_server,
    running,
    vllm_server,
)
from .transformers_peer import TransformersPeer

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
LOGS = ROOT / "build" / "peers-logs"
TRANSFORMERS = "transformers"


def main(  # noqa: PLR0913 - one parameter a flag
    *,
    prompts: Annotated[Path | None, typer.Option(help="Prompt file. Default: bundled.")] = None,
    num_prompts: Annotated[
        int, typer.Option(help="Least prompts for each number of streams.")
    ] = 16,
    tokens: Annotated[int, typer.Option(help="New tokens for each.")] = 128,
    rounds: Annotated[int, typer.Option(help="Times that every server runs.")] = 3,
    streams: Annotated[str, typer.Option(help="Requests at once.")] = "1,8,32",
    threads: Annotated[int, typer.Option(help="Threads of each server's model.")] = 1,
    best: Annotated[
        str, typer.Option(help="Drafters of draftline's best setting.")
    ] = "suffix,prompt_lookup",
    only: Annotated[str, typer.Option(help="Part of the names of servers to run.")] = "",
    install: Annotated[bool, typer.Option("--install", help="Make vLLM's environment.")] = False,
    environment: Annotated[Path, typer.Option(help="Folder of vLLM's environment.")] = ROOT
    / "build"
    / "peers-venv",
    eager: Annotated[bool, typer.Option("--eager", help="vLLM does not compile.")] = False,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Compare servers of one model."""
    torch.set_num_threads(threads)
    console = Console(width=110, highlight=False)
    peer = PeerEnvironment(environment, "cuda" if torch.cuda.is_available() else "cpu")
    if install and peer.version() is None:
        peer.install()
    if peer.version() is None:
        console.print(f"no vLLM in {environment}: left out; --install installs it")
    found = bench_prompts(prompts)
    # Neighbours in a file are alike.
    Random(0).shuffle(found)
    counts = [int(count) for count in streams.split(",")]
    plans = make_plans(Plan(prompts=found, max_tokens=tokens), counts, num_prompts)
    specs = [spec for spec in _specs(peer, best, threads, eager=eager) if only in spec.name]
    rows = _run_rounds(plans, specs, rounds, console)
    if only in TRANSFORMERS:
        _run_transformers(plans, rounds, rows)
    print_table(rows, console)
    console.print(machine().line(), f"vLLM {peer.version()}", sep="; ")
    what = {
        "machine": machine().fields(),
        "vllm": peer.version(),
        "vllm_eager": eager,
        "threads": threads,
        "num_prompts": num_prompts,
        "max_tokens": tokens,
        "commands": {spec.name: _shown(spec, peer) for spec in specs},
    }
    output.write_text(json.dumps(fields(rows, what), indent=1) + "\n")


def _shown(spec: ServerSpec, peer: PeerEnvironment) -> str:
    """The command without the folders of this machine."""
    command = shlex.join([*spec.command, "0"])
    for interpreter in (sys.executable, str(peer.python)):
        command = command.replace(interpreter, "python")
    return command.replace(str(ROOT), ".")


def _run_rounds(
    plans: Plans, specs: Sequence[ServerSpec], num_rounds: int, console: Console
) -> Rows:
    """All servers in each round, beginning with another one each time."""
    rows = Rows()
    for turn in range(num_rounds if specs else 0):
        first = turn % len(specs)
        for spec in [*specs[first:], *specs[:first]]:
            console.print(f"round {turn + 1} of {num_rounds}: {spec.name}")
            try:
                with running(spec, LOGS) as url:
                    found = measure_server(url, plans)
            except DraftlineError as error:
                console.print(f"LEFT OUT in this round: {error}", style="bold red")
                continue
            for count, measured in found.items():
                rows.add_server(spec.name, count, measured)
    return rows


def _run_transformers(plans: Plans, num_rounds: int, rows: Rows) -> None:
    """Its own kinds of decoding, in this process, in turn; it speculates for one prompt only."""
    peer = TransformersPeer(TARGET, DRAFTER)
    modes = {
        "plain": {},
        "prompt lookup": {"prompt_lookup_num_tokens": 10},
        "assisted": {"assistant_model": peer.assistant},
    }
    for _ in range(num_rounds):
        for name, options in modes.items():
            for batch, plan in plans.by_streams.items():
                if options and batch > 1:
                    continue
                run = measure_transformers(peer, plan, options, batch)
                rows.add_in_process(f"{TRANSFORMERS}, {name}, in process", batch, run)


def _specs(peer: PeerEnvironment, best: str, threads: int, *, eager: bool) -> Iterator[ServerSpec]:
    """Every server that can run here, draftline without drafters first."""
    chosen = {
        "plain": (),
        "prompt_lookup": ("prompt_lookup",),
        best.replace(",", " + "): tuple(best.split(",")),
        "all": tuple(DRAFTERS),
    }
    for name, drafters in chosen.items():
        yield draftline_server(name, drafters, threads)
    for name in ("plain", best.replace(",", " + ")):
        yield draftline_server(f"{name}, compiled", chosen[name], threads, compiled=True)
    if peer.version() is not None:
        for name in VLLM_SPECULATION:
            yield vllm_server(name, peer, threads, eager=eager)


if __name__ == "__main__":
    typer.run(main)
