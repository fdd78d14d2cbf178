"""Is a server with drafters ever slower than one without, or than the best fixed setting?

    python -m draftline.benchmarks.serving.budget_promise [--prompts code=FILE] [--rounds 3]
    python -m draftline.benchmarks.serving.budget_promise --model FOLDER --chat --prompts chats=FILE
    python -m draftline.benchmarks.serving.budget_promise --head FOLDER --drafters head,head+suffix

For each set of drafters, load, temperature and kind of prompts four engines start: without
drafters, with them, with them at fixed numbers of nodes, and once more without drafters, which
shows how far from 1 ratios lie by chance on this machine. Each decodes one half of the prompts
fresh and then the other half, part by part and in turns, so that a machine that becomes slower
slows all of them. Engines also differ by where in memory their weights lie: each round starts them
in another order, so take as many rounds as engines, or a multiple. `fresh` and `steady` are ratios
of tokens a second to those of plain decoding in the same half, `of best` is that of the second half
to the best fixed setting. A half has so many prompts, and such long answers, that plain decoding
takes about `--seconds`. Prints a row for each, writes JSON after each.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from ...cluster.config import DrafterConfig, EngineConfig
from ...deploy.cli.bench.endpoints import bench_prompts
from ...deploy.engine.async_engine import AsyncEngine
from ...measure.clients.endpoint import Load, Setting, run_load
from ...measure.clients.engine_endpoint import EngineEndpoint, collector_spared
from ...measure.prompts import BenchPrompt
from ...measure.records import RunMetrics, machine, run_metrics, total
from ...measure.runs.matched import Plan

RESULTS = Path(__file__).parents[1] / "results" / "budget_promise.json"
DRAFTERS: dict[str, DrafterConfig] = {
    "prompt_lookup": DrafterConfig(kind="prompt_lookup"),
    "spectra": DrafterConfig(kind="spectra", pool=False),
    "spectra with pool": DrafterConfig(kind="spectra"),
    "anpd": DrafterConfig(kind="anpd"),
    # Every round asks the same again: answers of the round before would be all it needs.
    "suffix": DrafterConfig(kind="suffix", answer_tokens=0),
    "token_recycling": DrafterConfig(kind="token_recycling"),
    "retrieval": DrafterConfig(kind="retrieval", store="demo"),
    "model": DrafterConfig(kind="model", model="demo-drafter"),
}
MAX_MODEL_LEN = 1024
# Longer ones leave no room for answers.
MAX_PROMPT_LETTERS = 2000
# Most parts of a half; each has two prompts a stream where there are so many.
PARTS = 4
# Prompts that every engine decodes plainly at first, at least; tokens of each.
WARM_UP, WARM_UP_TOKENS = 2, 64
# Most tokens of an answer: its prompt and it fit into the model's length.
MAX_ANSWER = 256
PLAIN, ADAPTIVE = Setting("plain", ()), Setting("adaptive", None)
CONTROL = Setting("plain again", ())
# Labels of the ratios of a row.
RATIOS = {"fresh": "fresh", "steady": "steady", "of best": "of_best", CONTROL.name: "control"}

# Of each setting, by name: its runs of the parts of a half.
Runs = Mapping[str, Sequence[RunMetrics]]


@dataclass(frozen=True, slots=True)
class BudgetCell:
    """What is measured together.

    is_chat  prompts are said by a user, and answers end where the model ends them
    """

    model: str
    is_chat: bool
    drafters: str
    prompts: str
    temperature: float
    streams: int
    threads: int


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """Ratios of one cell, one a round; `best` is the best fixed setting, of the medians.

    control       of the second engine without drafters, in both halves of each round
    tau           tokens a step of the adaptive engine, in the second half
    half_seconds  that plain decoding of the second half took, median
    """

    cell: BudgetCell
    fresh: tuple[float, ...]
    steady: tuple[float, ...]
    of_best: tuple[float, ...]
    control: tuple[float, ...]
    best: str
    tau: float
    plain_rate: float
    half_seconds: float


def main(  # noqa: PLR0913 - one parameter a flag
    *,
    model: Annotated[str, typer.Option(help="Folder of the target, or `demo`.")] = "demo",
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts go through the model's chat template.")
    ] = False,
    drafters: Annotated[
        str, typer.Option(help="Sets of drafters, parted by commas; + joins several.")
    ] = "suffix+prompt_lookup",
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE or NAME=FILE@CATEGORY; else the bundled ones."),
    ] = None,
    streams: Annotated[str, typer.Option(help="Requests at once.")] = "1,8,32",
    temperatures: Annotated[str, typer.Option(help="Temperatures.")] = "0,0.7,1",
    head: Annotated[Path | None, typer.Option(help="A trained head, the drafter `head`.")] = None,
    fixed_nodes: Annotated[
        str, typer.Option(help="Tree sizes that are tried as fixed settings; empty: none.")
    ] = "4,8,16",
    threads: Annotated[int, typer.Option(help="Of the target.")] = 1,
    tokens: Annotated[int, typer.Option(help="New tokens for each, at least.")] = 128,
    seconds: Annotated[float, typer.Option(help="Of plain decoding, in each half.")] = 6.0,
    rounds: Annotated[int, typer.Option(help="Times that every cell is measured.")] = 1,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Measure what the node budget promises."""
    torch.set_num_threads(threads)
    known = dict(DRAFTERS)
    if head is not None:
        known["head"] = DrafterConfig(kind="head", model=str(head))
    sets = {names: [known[name] for name in names.split("+")] for names in drafters.split(",")}
    fixed = {
        Setting(f"{count} nodes always", None): int(count)
        for count in filter(None, fixed_nodes.split(","))
    }
    console = Console(width=110, highlight=False)
    kinds = dict(_kind(text) for text in prompts or ["bundled"])
    cells = [
        BudgetCell(model, chat, *parts, threads)
        for parts in product(
            sets,
            kinds,
            map(float, temperatures.split(",")),
            map(int, streams.split(",")),
        )
    ]
    rows: list[BudgetRow] = []
    for cell in cells:
        engines = _configs(cell, sets[cell.drafters], fixed)
        row = asyncio.run(_measure(cell, engines, kinds[cell.prompts], tokens, seconds, rounds))
        rows.append(row)
        console.print(_line(row))
        what = {
            "machine": machine().fields(), "tokens": tokens, "seconds": seconds, "rounds": rounds
        }  # fmt: skip
        content = {**what, "rows": [asdict(one) for one in rows], "means": [*_means(rows)]}
        output.write_text(json.dumps(content, indent=1) + "\n")
    for mean in _means(rows):
        console.print(", ".join(f"{label} {value}" for label, value in mean.items()))
    console.print(machine().line())


def _kind(text: str) -> tuple[str, list[BenchPrompt]]:
    """The name and the prompts of `NAME`, `NAME=FILE` or `NAME=FILE@CATEGORY`."""
    name, _, file = text.partition("=")
    path, _, category = file.partition("@")
    found = bench_prompts(Path(path) if path else None)
    found = [
        prompt
        for prompt in found
        if len(prompt.text) <= MAX_PROMPT_LETTERS and category in {"", prompt.category}
    ]
    # Neighbours in a file are alike.
    Random(0).shuffle(found)
    return name, found


async def _measure(
    cell: BudgetCell, configs: Mapping[Setting, EngineConfig], prompts: Sequence[BenchPrompt],
    tokens: int, seconds: float, rounds: int,
) -> BudgetRow:  # fmt: skip
    load = Load(concurrency=cell.streams)
    plan = Plan(prompts=prompts, max_tokens=tokens, temperature=cell.temperature, load=load,
                is_chat=cell.is_chat, ignore_eos=not cell.is_chat)  # fmt: skip
    found = [await _round(configs, plan, seconds, turn) for turn in range(rounds)]
    names = [setting.name for setting in configs if setting not in {ADAPTIVE, CONTROL}]
    median = {name: statistics.median(_rate(steady[name]) for _, steady in found) for name in names}
    best = max(names, key=lambda name: median[name])
    counts = [run.counts for run in found[-1][1][ADAPTIVE.name] if run.counts is not None]
    return BudgetRow(
        cell,
        tuple(_ratio(fresh, PLAIN.name) for fresh, _ in found),
        tuple(_ratio(steady, PLAIN.name) for _, steady in found),
        tuple(_ratio(steady, best) for _, steady in found),
        tuple(_ratio(half, PLAIN.name, CONTROL.name) for halves in found for half in halves),
        best,
        round(total(counts).tau, 2),
        round(median[PLAIN.name], 1),
        round(statistics.median(_seconds(steady[PLAIN.name]) for _, steady in found), 1),
    )


async def _round(
    configs: Mapping[Setting, EngineConfig], plan: Plan, seconds: float, turn: int
) -> tuple[Runs, Runs]:
    """The first half, of those that are compared, and the second, of all."""
    streams = plan.load.concurrency
    assert streams is not None
    first = turn % len(configs)
    starts = [*configs.items()][first:] + [*configs.items()][:first]
    async with _engines(dict(starts)) as endpoints:
        # What any first step pays, with or without drafters.
        prompts = plan.prompts[: max(WARM_UP, streams)]
        warm_up = replace(plan, prompts=prompts, max_tokens=WARM_UP_TOKENS)
        rates = {
            endpoint: (await _run(endpoint, warm_up, PLAIN)).output_throughput
            for endpoint in dict.fromkeys(endpoints.values())
        }
        halves = _halves(plan, streams, seconds * rates[endpoints[PLAIN]])
        compared = {one: endpoints[one] for one in (PLAIN, ADAPTIVE, CONTROL)}
        fresh = await _in_turns(compared, halves[0], streams, turn)
        steady = await _in_turns(endpoints, halves[1], streams, turn)
    return fresh, steady


async def _in_turns(
    endpoints: Mapping[Setting, EngineEndpoint], half: Plan, streams: int, turn: int
) -> Runs:
    """Part by part, each setting the first one in its turn."""
    runs: dict[str, list[RunMetrics]] = {one.name: [] for one in endpoints}
    settings = list(endpoints)
    count = max(1, min(PARTS, len(half.prompts) // (2 * streams)))
    bounds = [len(half.prompts) * part // count for part in range(count + 1)]
    for part, (start, end) in enumerate(pairwise(bounds)):
        first = (part + turn) % len(settings)
        plan = replace(half, prompts=half.prompts[start:end], seed=half.seed + start)
        for one in [*settings[first:], *settings[:first]]:
            runs[one.name].append(await _run(endpoints[one], plan, one))
    return runs


def _halves(plan: Plan, streams: int, num_tokens: float) -> list[Plan]:
    """Prompts of so many new tokens each, or as many as there are, with longer answers."""
    count = math.ceil(num_tokens / plan.max_tokens)
    count = min(max(2 * streams, count), len(plan.prompts) // 2)
    tokens = min(max(plan.max_tokens, math.ceil(num_tokens / count)), MAX_ANSWER)
    return [
        replace(plan, prompts=plan.prompts[start : start + count], max_tokens=tokens)
        for start in (0, count)
    ]


async def _run(endpoint: EngineEndpoint, plan: Plan, setting: Setting) -> RunMetrics:
    records, seconds = await run_load(endpoint, plan.asks(setting, setting.name), plan.load)
    return run_metrics(records, seconds)


def _configs(
    cell: BudgetCell, drafters: Sequence[DrafterConfig], fixed: Mapping[Setting, int]
) -> Mapping[Setting, EngineConfig]:
    common: dict[str, Any] = {
        "model": cell.model,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": cell.streams,
        "kv_cache_tokens": cell.streams * MAX_MODEL_LEN,
        "enable_prefix_caching": False,
    }
    return {
        PLAIN: EngineConfig(**common),
        ADAPTIVE: EngineConfig(**common, drafters=drafters),
        CONTROL: EngineConfig(**common),
        **{
            setting: EngineConfig(
                **common, drafters=drafters, node_budget="full", tree_nodes=num_nodes
            )
            for setting, num_nodes in fixed.items()
        },
    }


@asynccontextmanager
async def _engines(
    configs: Mapping[Setting, EngineConfig],
) -> AsyncIterator[Mapping[Setting, EngineEndpoint]]:
    """Of each setting, started."""
    engines = {setting: AsyncEngine(config) for setting, config in configs.items()}
    try:
        for engine in engines.values():
            await engine.start()
        # As servers do: a full collection takes a tenth of a half, and only one setting has it.
        with collector_spared():
            yield {
                setting: EngineEndpoint(engine, per_request=False, tokenizer=engine.tokenizer)
                for setting, engine in engines.items()
            }
    finally:
        for engine in engines.values():
            await engine.close()


def _seconds(runs: Sequence[RunMetrics]) -> float:
    return sum(run.seconds for run in runs)


def _rate(runs: Sequence[RunMetrics]) -> float:
    """Tokens a second."""
    return sum(run.num_tokens for run in runs) / _seconds(runs)


def _ratio(runs: Runs, base: str, of: str = ADAPTIVE.name) -> float:
    return round(_rate(runs[of]) / _rate(runs[base]), 3)


def _means(rows: Sequence[BudgetRow]) -> Iterator[dict[str, str]]:
    """Of each set of drafters, greedy and sampled: geometric means over cells and rounds, with
    95 % intervals from their scatter."""
    for drafters in dict.fromkeys(row.cell.drafters for row in rows):
        for kind, is_sampled in (("greedy", False), ("sampled", True)):
            own = [
                row
                for row in rows
                if row.cell.drafters == drafters and bool(row.cell.temperature) == is_sampled
            ]
            if len(own) > 1:
                fields = {"drafters": drafters, "temperature": kind, "cells": str(len(own))}
                yield fields | {
                    label: _mean([ratio for row in own for ratio in getattr(row, name)])
                    for label, name in RATIOS.items()
                }


def _mean(ratios: Sequence[float]) -> str:
    logs = np.log(ratios)
    error = 1.96 * logs.std(ddof=1) / math.sqrt(len(ratios))
    low, middle, high = np.exp(logs.mean() + error * np.array([-1, 0, 1]))
    return f"{middle:.3f} ({low:.3f} - {high:.3f})"


def _line(row: BudgetRow) -> str:
    cell = row.cell
    parts = [
        f"{label} {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
        for label, ratios in ((label, getattr(row, name)) for label, name in RATIOS.items())
    ]
    return (
        f"{cell.drafters}, {cell.prompts}, temperature {cell.temperature:g}, {cell.streams} at "
        f"once: {', '.join(parts)} ({row.best}), tau {row.tau:g}"
    )


if __name__ == "__main__":
    typer.run(main)
