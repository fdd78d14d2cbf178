"""Batch-1 decoding on the demo model, in one run: transformers beside draftline.

    python -m draftline.benchmarks.step.decode [--prompts 12] [--tokens 128] [--rounds 3]

Every mode decodes the same held-out prompts greedily, on one thread, in turn within each round, so
that ratios hold when the machine's speed drifts. Prints tokens a second, the ratio to transformers'
plain decoding, and tau (tokens a pass of the target); writes JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from ...cluster.config import DrafterConfig, EngineConfig
from ...core.request.sampling_params import SamplingParams
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.engine.engine import Engine
from ...measure.records.record import machine
from ..peers.transformers_peer import TransformersPeer
from .step_overhead import StepOverhead, measure_overhead

RESULTS = Path(__file__).parents[1] / "results"
DRAFTERS: dict[str, DrafterConfig] = {
    "prompt_lookup": DrafterConfig(kind="prompt_lookup"),
    "spectra": DrafterConfig(kind="spectra", pool=False),
    "spectra with pool": DrafterConfig(kind="spectra"),
    "anpd": DrafterConfig(kind="anpd"),
    # Every round asks the same again: answers of the round before would be all it needs.
    "suffix": DrafterConfig(kind="suffix", answer_tokens=0),
    "retrieval": DrafterConfig(kind="retrieval", store="demo"),
    "model": DrafterConfig(kind="model", model="demo-drafter"),
}
ALL = ("spectra", "retrieval", "model")


@dataclass(frozen=True, slots=True)
class Run:
    """One pass of one mode over all prompts: seconds, and tokens and target passes after the
    prompt's own.
    """

    seconds: float
    tokens: int
    passes: int
    texts: tuple[tuple[int, ...], ...]


Mode = Callable[[list[list[int]], int], Run]


def main(
    prompts: Annotated[int, typer.Option(help="Held-out prompts.")] = 12,
    tokens: Annotated[int, typer.Option(help="New tokens for each.")] = 128,
    rounds: Annotated[int, typer.Option(help="Times that every mode runs.")] = 3,
    tree_nodes: Annotated[int, typer.Option(help="Node budget of a tree.")] = 8,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS / "decode.json",
) -> None:
    """Compare transformers and draftline at batch 1."""
    torch.set_num_threads(1)
    peer = TransformersPeer("demo", "demo-drafter")
    prompt_ids = [peer.encode(prompt.text) for prompt in held_out_prompts(prompts)]
    modes: dict[str, Mode] = {
        "transformers plain": _peer(peer, {}),
        "transformers prompt lookup": _peer(peer, {"prompt_lookup_num_tokens": 10}),
        "transformers assisted": _peer(peer, {"assistant_model": peer.assistant}),
    }
    engines = _engines(tree_nodes)
    modes |= {f"draftline {name}": _draftline(engine) for name, engine in engines.items()}
    runs: dict[str, list[Run]] = {name: [] for name in modes}
    for mode in modes.values():
        mode(prompt_ids[:1], 16)
    for _ in range(rounds):
        for name, mode in modes.items():
            runs[name].append(mode(prompt_ids, tokens))
    for engine in engines.values():
        engine.close()
    overhead = measure_overhead(num_nodes=60)
    _print(runs, overhead)
    _write(output, runs, overhead)


def _engines(tree_nodes: int) -> dict[str, Engine]:
    chosen: dict[str, tuple[str, ...]] = {"plain": (), **{name: (name,) for name in DRAFTERS}}
    chosen["all: " + " + ".join(ALL)] = ALL
    engines = {}
    for label, names in chosen.items():
        config = EngineConfig(
            model="demo",
            tree_nodes=tree_nodes if names else 0,
            # Rounds repeat the prompts, and transformers computes them anew each time.
            enable_prefix_caching=False,
            drafters=[DRAFTERS[name] for name in names],
        )
        engines[label] = Engine(config)
    return engines


def _draftline(engine: Engine) -> Mode:
    def mode(prompts: list[list[int]], tokens: int) -> Run:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        outputs = [engine.generate([prompt], params)[0] for prompt in prompts]
        seconds = time.perf_counter() - start
        return Run(
            seconds,
            sum(len(output.token_ids) - 1 for output in outputs),
            sum(output.metrics.num_steps for output in outputs),
            tuple(output.token_ids for output in outputs),
        )

    return mode


def _peer(peer: TransformersPeer, options: dict[str, object]) -> Mode:
    def mode(prompts: list[list[int]], tokens: int) -> Run:
        start = time.perf_counter()
        outputs = [peer.generate(prompt, tokens, options) for prompt in prompts]
        seconds = time.perf_counter() - start
        return Run(
            seconds,
            sum(len(output.token_ids) - 1 for output in outputs),
            sum(output.passes - 1 for output in outputs),
            tuple(output.token_ids for output in outputs),
        )

    return mode


def _rates(runs: list[Run]) -> list[float]:
    return [run.tokens / run.seconds for run in runs]


def _print(runs: dict[str, list[Run]], overhead: StepOverhead) -> None:
    console = Console(width=110)
    plain = _rates(runs["transformers plain"])
    truth = runs["transformers plain"][0].texts
    columns = ("mode", "tokens/s", "(min - max)", "x transformers plain", "tau", "same text")
    table = Table(*columns, title="Batch 1, greedy, one thread; medians over rounds")
    for name, found in runs.items():
        rates = _rates(found)
        ratio = statistics.median(r / p for r, p in zip(rates, plain, strict=True))
        same = sum(a == b for a, b in zip(found[0].texts, truth, strict=True))
        table.add_row(
            name,
            f"{statistics.median(rates):.0f}",
            f"{min(rates):.0f} - {max(rates):.0f}",
            f"{ratio:.2f}",
            f"{found[0].tokens / found[0].passes:.2f}",
            f"{same} of {len(truth)}",
        )
    console.print(table)
    console.print(overhead.line())
    console.print(machine().line())


def _write(path: Path, runs: dict[str, list[Run]], overhead: StepOverhead) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": machine().fields(),
        "modes": {
            name: {"tokens_per_second": _rates(found), "tau": found[0].tokens / found[0].passes}
            for name, found in runs.items()
        },
        "step_overhead_ms": overhead.fields(),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
