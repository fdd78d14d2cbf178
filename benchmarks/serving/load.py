"""Speculation under load: is it ever slower than decoding without, and how do trees shrink?

    python -m draftline.benchmarks.serving.load [--requests 1,2,4,8,16,32]

One engine with drafters serves batches of greedy requests with and without speculation, in turn.
Prints total tokens a second, the ratio, and what a tree held; writes JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from ...cluster.config import EngineConfig
from ...core.request.output import RequestOutput
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.engine.engine import Engine
from ...measure.records.record import machine
from ..step.decode import DRAFTERS

RESULTS = Path(__file__).parents[1] / "results" / "load.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`requests` at once; rates are total tokens a second, one a round.

    ratio  median over rounds of speculative to plain
    nodes  mean nodes of a tree
    tau    mean tokens a verification step
    """

    requests: int
    plain: tuple[float, ...]
    speculative: tuple[float, ...]
    ratio: float
    nodes: float
    tau: float
    same_texts: bool


def main(
    *,
    requests: Annotated[str, typer.Option(help="Requests at once.")] = "1,2,4,8,16,32",
    drafters: Annotated[str, typer.Option(help="Names as in decode.py.")] = "spectra,model",
    tokens: Annotated[int, typer.Option(help="New tokens for each.")] = 96,
    rounds: Annotated[int, typer.Option(help="Times that every batch runs.")] = 3,
    tree_nodes: Annotated[int, typer.Option(help="Most nodes of a tree.")] = 16,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Compare speculation with none, at several loads."""
    torch.set_num_threads(1)
    counts = [int(count) for count in requests.split(",")]
    config = EngineConfig(
        model="demo",
        tree_nodes=tree_nodes,
        max_num_seqs=max(counts),
        kv_cache_tokens=max(counts) * 512,
        enable_prefix_caching=False,
        drafters=[DRAFTERS[name] for name in drafters.split(",")],
    )
    with Engine(config) as engine:
        rows = [_measure(engine, count, tokens, rounds) for count in counts]
    _print(rows)
    content = {
        "machine": machine().fields(),
        "drafters": drafters,
        "rows": [asdict(row) for row in rows],
    }
    output.write_text(json.dumps(content, indent=1) + "\n")


def _measure(engine: Engine, count: int, tokens: int, rounds: int) -> Row:
    prompts = list(islice(cycle(prompt.text for prompt in held_out_prompts(66)), count))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    found: dict[bool, list[tuple[float, list[RequestOutput]]]] = {False: [], True: []}
    for turn in range(rounds + 1):
        for speculative in (False, True):
            start = time.perf_counter()
            answers = engine.generate(prompts, params, RequestOptions(speculative=speculative))
            rate = sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - start)
            # The first turn teaches the budget what a row and a drafter are worth here.
            if turn:
                found[speculative].append((rate, answers))
    plain = tuple(rate for rate, _ in found[False])
    speculative = tuple(rate for rate, _ in found[True])
    metrics = [answer.metrics for _, answers in found[True] for answer in answers]
    steps = sum(one.num_steps for one in metrics)
    return Row(
        requests=count,
        plain=plain,
        speculative=speculative,
        ratio=statistics.median(a / b for a, b in zip(speculative, plain, strict=True)),
        nodes=sum(one.num_draft_tokens for one in metrics) / steps,
        tau=sum(one.acceptance_length * one.num_steps for one in metrics) / steps,
        same_texts=_texts(found[False][0][1]) == _texts(found[True][0][1]),
    )


def _texts(answers: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def _print(rows: list[Row]) -> None:
    columns = ("requests", "plain tokens/s", "speculative", "ratio", "nodes a tree", "tau", "same")
    table = Table(*columns, title="Greedy, one thread; medians over rounds")
    for row in rows:
        table.add_row(
            str(row.requests),
            f"{statistics.median(row.plain):.0f}",
            f"{statistics.median(row.speculative):.0f}",
            f"{row.ratio:.2f}",
            f"{row.nodes:.1f}",
            f"{row.tau:.2f}",
            "yes" if row.same_texts else "NO",
        )
    console = Console(width=110)
    console.print(table)
    console.print(machine().line())


if __name__ == "__main__":
    typer.run(main)
