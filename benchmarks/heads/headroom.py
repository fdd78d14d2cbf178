"""What heads bring at most beside drafters that need no training, whatever decides about them.

    python -m draftline.benchmarks.heads.headroom [--cost-profile 8b-h100,70b-2-h200]

All drafters are asked in every step, and it is known who proposed a node: so is how far the step
would have come without the head, and with so many of its levels. A rule asks the head for so many
levels in some of the steps, as the times of a cost profile make most of them. One that knows how
far the step before came (`core/reach.py`), or how sure the others are of their own tree, too, is as
good as any that learns from these can be; one that knew what comes of it bounds them all. Steps go
in rounds, their rows take nothing, and each step takes as long as one of `ROWS` rows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from ...cluster.config import EngineConfig
from ...core.arrays import Float64, Int64
from ...core.reach import reach_of
from ...core.request.output import VerifiedTree
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...deploy.cli.bench.head_rows import TREE, UNTRAINED, HeadRows
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.engine.engine import AsyncEngine
from ...measure.records.record import machine
from ...measure.simulate.cost_profile import CostProfile, read_cost_profile

RESULTS = Path(__file__).parents[1] / "results" / "headroom.json"
ROWS, CONTEXT_LEN = 32, 512
# Of a head's tree; rows of a pass that drafts a level.
NUM_LEVELS, LEVEL_ROWS = 6, 10
HEADS = ("griffin", "specformer", "dflash")
# Lower ends of classes of sureness: tokens that the others' tree expects.
SURENESS = (0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Step:
    """What a step would have brought.

    reach     of the step before
    sureness  class of what the others' tree expected
    accepted  int64 [1 + levels]  nodes, with so many of the head's levels
    """

    reach: int
    sureness: int
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Headroom:
    """Tokens a second over those without the head, by what a rule knows.

    alone        tokens a step without the head
    by_sureness  of the others, and reach
    asked        share of steps in which that rule asks
    """

    profile: str
    temperature: float
    head: str
    steps: int
    alone: float
    by_reach: float
    by_sureness: float
    in_hindsight: float
    asked: float


def counted(trees: Sequence[VerifiedTree], head: str) -> list[Step]:
    """The steps of one answer."""
    steps, before = [], 0
    for tree in trees:
        accepted = tuple(_accepted(tree, head, levels) for levels in range(NUM_LEVELS + 1))
        own = [value for value, by in zip(tree.values, tree.sources, strict=True) if by != head]
        sureness = int(np.digitize(sum(own), SURENESS))
        steps.append(Step(reach_of(before), sureness, accepted))
        before = len(tree.path)
    return steps


def _accepted(tree: VerifiedTree, head: str, num_levels: int) -> int:
    """Nodes of the path up to the first that the head alone proposed, deeper than its levels."""
    for depth, place in enumerate(tree.path):
        if tree.sources[place] == head and depth >= num_levels:
            return depth
    return len(tree.path)


def best_speed(
    accepted: Int64, groups: Int64, step_s: float, costs_s: Float64
) -> tuple[float, float]:
    """Most tokens a second, and the share of steps with a draft, where all steps of a group have
    drafts of one depth.

    accepted  int64 [steps, 1 + levels]
    costs_s   float64 [1 + levels]
    """
    tokens, depths = 1.0 + accepted, np.zeros(len(accepted), dtype=np.int64)
    speed = tokens[:, 0].sum() / (len(tokens) * step_s)
    # Of a ratio of sums the best parts are those of largest tokens less speed times seconds.
    while True:
        for group in np.unique(groups):
            own = groups == group
            depths[own] = np.argmax(tokens[own].mean(axis=0) - speed * costs_s)
        made = tokens[np.arange(len(tokens)), depths].sum()
        better = made / (len(tokens) * step_s + costs_s[depths].sum())
        if better <= speed * (1 + 1e-9):
            return float(speed), float((depths > 0).mean())
        speed = better


def headroom(
    profile: CostProfile, temperature: float, head: str, steps: Sequence[Step]
) -> Headroom:
    """What rules make of these steps."""
    step_s = profile.num_stages * profile.stage_s(ROWS, CONTEXT_LEN, ROWS * CONTEXT_LEN)
    levels_s = [profile.draft_s(head, 1 + level, LEVEL_ROWS) for level in range(NUM_LEVELS)]
    costs_s = np.array([0.0, *levels_s])
    accepted = np.array([step.accepted for step in steps])
    reaches = np.array([step.reach for step in steps])
    both = reaches * (len(SURENESS) + 1) + np.array([step.sureness for step in steps])
    each = np.arange(len(steps))
    alone = (1.0 + accepted[:, 0]).mean() / step_s
    known, asked = best_speed(accepted, both, step_s, costs_s)
    return Headroom(
        profile.name, temperature, head, len(steps), float(1.0 + accepted[:, 0].mean()),
        best_speed(accepted, reaches, step_s, costs_s)[0] / alone, known / alone,
        best_speed(accepted, each, step_s, costs_s)[0] / alone, asked,
    )  # fmt: skip


async def answered(
    head: str, prompts: Sequence[str], max_tokens: int, temperature: float
) -> list[Step]:
    """Answer all prompts, one at a time."""
    rows = HeadRows({head: f"demo-{head}"}, (head,), store="demo")
    by_name = {drafter.name: drafter for drafter in rows.drafters()}
    settings = {setting.name: setting.drafters or () for setting in rows.settings()}
    # A node belongs to the first that proposes it, so the head comes last.
    names = *settings[UNTRAINED], f"{head}-{TREE}"
    config = EngineConfig(
        model="demo", drafters=tuple(by_name[name] for name in names), node_budget="ordered",
        tree_nodes=128, draft_deadline_ms=20_000,
    )  # fmt: skip
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
    steps: list[Step] = []
    engine = AsyncEngine(config)
    await engine.start()
    try:
        for prompt in prompts:
            trees = [tree async for tree in _trees(engine, prompt, params)]
            steps += counted(trees, f"{head}-{TREE}")
    finally:
        await engine.close()
    return steps


async def _trees(
    engine: AsyncEngine, prompt: str, params: SamplingParams
) -> AsyncIterator[VerifiedTree]:
    async for delta in engine.stream(prompt, params, RequestOptions(explain=True)):
        for tree in delta.trees:
            yield tree


def table(found: Sequence[Headroom]) -> Table:
    """A row a profile, a temperature and a head."""
    shown = Table(title="tokens a second with a head, over those without it")
    names = "profile", "T", "head", "alone", "reach", "sureness", "hindsight", "asked"
    for name in names:
        shown.add_column(name, justify="left" if name in {"profile", "head"} else "right")
    for own in found:
        shown.add_row(
            own.profile, f"{own.temperature:g}", own.head, f"{own.alone:.2f}",
            f"{own.by_reach:.3f}", f"{own.by_sureness:.3f}", f"{own.in_hindsight:.3f}",
            f"{own.asked:.0%}",
        )  # fmt: skip
    return shown


def main(
    *,
    cost_profile: Annotated[str, typer.Option(help="NAME,...")] = "8b-h100,70b-2-h200",
    heads: Annotated[str, typer.Option(help="Bundled heads: NAME,...")] = ",".join(HEADS),
    num_prompts: Annotated[
        int | None, typer.Option(help="Bundled prompts; all by default.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Count, print, write."""
    torch.set_num_threads(1)
    profiles = [read_cost_profile(name) for name in cost_profile.split(",")]
    prompts = [prompt.text for prompt in held_out_prompts(num_prompts)]
    found = []
    for temperature in (0.0, 1.0):
        for head in heads.split(","):
            steps = asyncio.run(answered(head, prompts, max_tokens, temperature))
            found += [headroom(profile, temperature, head, steps) for profile in profiles]
    content = {
        "machine": machine().fields(), "prompts": len(prompts), "max_tokens": max_tokens,
        "found": [asdict(own) for own in found],
    }  # fmt: skip
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table(found))
    console.print(machine().line())


if __name__ == "__main__":
    typer.run(main)
