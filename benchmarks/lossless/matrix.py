"""Whether speculation changes any token: the matrix that `make test-full` runs.

    python -m draftline.benchmarks.lossless.matrix [--prompts 24] [--stages 1,2,3]
    python -m draftline.benchmarks.lossless.matrix --model smollm2 --mixes copying,tli
    python -m draftline.benchmarks.lossless.matrix --model demo-hybrid --mixes headless,models

Greedy answers are compared with transformers' `generate`, sampled ones with the engine's own
answers without speculation. Where two answers part, the target's scores of the two tokens decide:
a near-tie may fall either way when a batch of another shape rounds differently; anything else is a
fault.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ...cluster.config import Backend, DrafterConfig, EngineConfig
from ...cluster.engine.assembly import plan_model
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...deploy.cli.bench.endpoints import bench_prompts
from ...deploy.engine.engine import Engine
from ...measure.clients.engine_endpoint import prompt_ids
from ...measure.prompts import spread
from ...measure.records import machine
from ...measure.runs.near_tie import Judge, Parting
from ...models.load.checkpoint import answers_chats
from ...models.text.tokenizer import load_tokenizer
from ..peers.transformers_peer import TransformersPeer

RESULTS = Path(__file__).parents[1] / "results"


def _other(vocabulary: str, **options: object) -> DrafterConfig:
    return DrafterConfig(
        kind="model", name=vocabulary, model="demo-drafter-other-vocab", vocabulary=vocabulary,
        **options,
    )  # fmt: skip


DRAFTERS: dict[str, DrafterConfig] = {
    "prompt_lookup": DrafterConfig(kind="prompt_lookup"),
    "spectra": DrafterConfig(kind="spectra"),
    "anpd": DrafterConfig(kind="anpd"),
    "suffix": DrafterConfig(kind="suffix"),
    "lookahead": DrafterConfig(kind="lookahead"),
    "token_recycling": DrafterConfig(kind="token_recycling"),
    "retrieval": DrafterConfig(kind="retrieval", store="demo"),
    "model": DrafterConfig(kind="model", model="demo-drafter"),
    "head": DrafterConfig(kind="head", model="demo-griffin"),
}
# Small models of other tokenizers, and three at once.
OF_MODELS: dict[str, DrafterConfig] = {
    "tli": _other("tli", tree="dynamic"),
    "slem": _other("slem"),
    "slrs": DrafterConfig(kind="model", name="slrs", model="demo-drafter-bytes", vocabulary="slrs"),
}
MIXES: dict[str, tuple[str, ...]] = {
    "none": (),
    **{name: (name,) for name in DRAFTERS},
    "all": tuple(DRAFTERS),
    **{name: (name,) for name in OF_MODELS},
    "models": ("model", "tli", "slem"),
}
# For any target: no store or model of the bundled one's vocabulary.
COPYING = tuple(name for name in DRAFTERS if name not in {"retrieval", "model", "head"})
# For `demo-hybrid`, which has the tokenizer of `demo`, and other hidden states.
HEADLESS = tuple(name for name in DRAFTERS if name != "head")
OF_OTHERS: dict[str, tuple[str, ...]] = {"copying": COPYING, "headless": HEADLESS}
HYBRID_MIXES = (*(name for name, own in MIXES.items() if "head" not in own), "headless")
PLAIN = RequestOptions(speculative=False)
SAMPLED = (
    SamplingParams(temperature=0.7, top_p=0.9, seed=1, ignore_eos=True, max_tokens=1),
    SamplingParams(temperature=0.7, seed=2, ignore_eos=True, max_tokens=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3, ignore_eos=True, max_tokens=1),
    SamplingParams(temperature=1.0, seed=4, ignore_eos=True, max_tokens=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """What is run. Sampled answers take the first `sampled_prompts` prompts, at half the length.

    model  the target; one with a chat template is asked chats
    """

    model: str = "demo"
    prompts: int = 24
    tokens: int = 128
    sampled_prompts: int = 8
    stages: tuple[int, ...] = (1, 2, 3)
    backends: tuple[Backend, ...] = ("local", "ray")
    mixes: tuple[str, ...] = tuple(MIXES)
    together: tuple[int, ...] = (1, 8)


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """One engine of the matrix: how many answers were compared, and where they parted."""

    backend: str
    stages: int
    mix: str
    together: int
    compared: int
    tokens: int
    tau: float
    near_ties: tuple[Parting, ...]
    faults: tuple[Parting, ...]


@dataclass(slots=True)
class Report:
    """All cells."""

    seconds: float = 0.0
    cells: list[MatrixCell] = field(default_factory=list)

    @property
    def faults(self) -> list[Parting]:
        """Partings that are not near-ties; must be empty."""
        return [parting for cell in self.cells for parting in cell.faults]

    @property
    def near_ties(self) -> list[Parting]:
        """Partings that float rounding explains."""
        return [parting for cell in self.cells for parting in cell.near_ties]

    def summary(self) -> str:
        """A few lines for people."""
        answers = sum(cell.compared for cell in self.cells)
        tokens = sum(cell.tokens for cell in self.cells)
        lines = [
            f"{len(self.cells)} engines, {answers} answers, {tokens} tokens compared in "
            f"{self.seconds:.0f} s",
            f"{len(self.near_ties)} near-ties, {len(self.faults)} other differences",
        ]
        lines += [f"near-tie: {parting}" for parting in self.near_ties[:10]]
        lines += [f"FAULT: {parting}" for parting in self.faults[:10]]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Keep the report as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "machine": machine().fields(),
            "summary": self.summary().splitlines(),
            "cells": [asdict(cell) for cell in self.cells],
        }
        path.write_text(json.dumps(content, indent=1) + "\n")


Tokens = tuple[int, ...]


def run_matrix(matrix: Matrix, console: Console | None = None) -> Report:
    """Run every cell; prints a line a cell where a console is given."""
    torch.set_num_threads(1)
    start = time.monotonic()
    peer = TransformersPeer(matrix.model)
    judge = Judge(peer.target, plan_model(EngineConfig(model=matrix.model)).request_factory())
    prompts = _prompts(matrix)
    greedy = [peer.generate(prompt, matrix.tokens, {}).token_ids for prompt in prompts]
    report = Report()
    references: dict[int, list[Tokens]] = {}
    for config, mix in _engines(matrix):
        with Engine(config) as engine:
            references = references or _sampled(engine, prompts, matrix, 8, PLAIN)
            for together in matrix.together:
                cell = _run_cell(
                    engine, _Case(config, mix, together), prompts, matrix, greedy, references, judge
                )
                report.cells.append(cell)
                if console is not None:
                    console.print(
                        f"{cell.backend} stages={cell.stages} {cell.mix} together={together}: "
                        f"{cell.compared} answers, tau {cell.tau:.2f}, near-ties "
                        f"{len(cell.near_ties)}, faults {len(cell.faults)}"
                    )
    report.seconds = time.monotonic() - start
    return report


def _prompts(matrix: Matrix) -> list[list[int]]:
    is_chat, tokenizer = answers_chats(matrix.model), load_tokenizer(matrix.model)
    asked = spread(bench_prompts(None, is_chat=is_chat), matrix.prompts)
    return [prompt_ids(tokenizer, prompt.asked(is_chat=is_chat)) for prompt in asked]


@dataclass(frozen=True, slots=True)
class _Case:
    config: EngineConfig
    mix: str
    together: int


def _engines(matrix: Matrix) -> Iterator[tuple[EngineConfig, str]]:
    for backend in matrix.backends:
        for stages in matrix.stages:
            for mix in matrix.mixes:
                config = EngineConfig(
                    model=matrix.model,
                    # On GPUs, too: the answers it is compared with are of float32.
                    dtype="float32",
                    backend=backend,
                    pipeline_parallel_size=stages,
                    # Three stages on a machine of two cores.
                    cpus_per_stage=0.1,
                    # What does not pay or comes late on this machine is to be compared as well.
                    node_budget="full",
                    pipelined_trees="on",
                    draft_deadline_ms=10_000,
                    drafters=[(DRAFTERS | OF_MODELS)[name] for name in (MIXES | OF_OTHERS)[mix]],
                )
                yield config, mix


def _run_cell(
    engine: Engine,
    case: _Case,
    prompts: list[list[int]],
    matrix: Matrix,
    greedy: list[Tokens],
    references: dict[int, list[Tokens]],
    judge: Judge,
) -> MatrixCell:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=matrix.tokens)
    outputs = [
        output
        for batch in _batches(prompts, case.together)
        for output in engine.generate(batch, params)
    ]
    partings = judge.partings(prompts, greedy, [out.token_ids for out in outputs], params)
    compared, tokens = len(outputs), sum(len(out.token_ids) for out in outputs)
    for index, answers in _sampled(engine, prompts, matrix, case.together).items():
        some = prompts[: matrix.sampled_prompts]
        partings += judge.partings(some, references[index], answers, SAMPLED[index])
        compared += len(answers)
        tokens += sum(map(len, answers))
    steps = sum(output.metrics.num_steps for output in outputs)
    return MatrixCell(
        backend=case.config.backend,
        stages=case.config.pipeline_parallel_size,
        mix=case.mix,
        together=case.together,
        compared=compared,
        tokens=tokens,
        tau=sum(len(output.token_ids) - 1 for output in outputs) / steps,
        near_ties=tuple(parting for parting in partings if parting.is_near_tie),
        faults=tuple(parting for parting in partings if not parting.is_near_tie),
    )


def _sampled(
    engine: Engine,
    prompts: list[list[int]],
    matrix: Matrix,
    together: int,
    options: RequestOptions | None = None,
) -> dict[int, list[Tokens]]:
    """Answers of the first prompts with every sampling setting."""
    found: dict[int, list[Tokens]] = {}
    for index, setting in enumerate(SAMPLED):
        params = replace(setting, max_tokens=matrix.tokens // 2)
        found[index] = [
            output.token_ids
            for batch in _batches(prompts[: matrix.sampled_prompts], together)
            for output in engine.generate(batch, params, options)
        ]
    return found


def _batches(prompts: Sequence[list[int]], size: int) -> Iterator[list[list[int]]]:
    for first in range(0, len(prompts), size):
        yield list(prompts[first : first + size])


def main(
    model: Annotated[str, typer.Option(help="The target.")] = "demo",
    prompts: Annotated[int, typer.Option(help="Held-out prompts.")] = 24,
    tokens: Annotated[int, typer.Option(help="New tokens for each.")] = 128,
    stages: Annotated[str, typer.Option(help="Numbers of stages.")] = "1,2,3",
    backends: Annotated[str, typer.Option(help="local, ray or both.")] = "local,ray",
    mixes: Annotated[str, typer.Option(help="Sets of drafters.")] = ",".join(MIXES),
    output: Annotated[Path, typer.Option(help="The report.")] = RESULTS / "lossless.json",
) -> None:
    """Run the matrix and keep its report; exits 1 if anything but near-ties differs."""
    names: list[Backend] = ["ray" if name == "ray" else "local" for name in backends.split(",")]
    matrix = Matrix(
        model=model,
        prompts=prompts,
        tokens=tokens,
        stages=tuple(int(count) for count in stages.split(",")),
        backends=tuple(names),
        mixes=tuple(mixes.split(",")),
    )
    console = Console(width=110)
    report = run_matrix(matrix, console)
    report.write(output)
    console.print(report.summary())
    raise typer.Exit(1 if report.faults else 0)


if __name__ == "__main__":
    typer.run(main)
