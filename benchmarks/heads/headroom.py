"""What heads bring at most beside drafters that need no training, whatever decides about them.

    python -m draftline.benchmarks.heads.headroom [--cost-profile 8b-h100,70b-2-h200]

Each answer is gone through as the others alone would go, by the nodes of theirs that are worth
their rows. At each step the head is asked, too, and what the step would have brought with so many
of its levels is known. A rule asks for so many levels in some of the steps, as the times of a cost
profile make most of them. One that knows how far the step before came (`core/reach.py`), or how
sure the others are of their own tree, too, is as good as any that learns from these can be; one
that knew what comes of it bounds them all. Steps go in rounds, with texts of `CONTEXT_LEN` tokens;
the host takes no time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from ...cluster.config import EngineConfig
from ...core.arrays import Bool, Float64, Int64
from ...core.reach import reach_of
from ...core.request.output import MAX_SHOWN_NODES, RequestOutput, VerifiedTree
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...deploy.cli.bench.head_rows import TREE, UNTRAINED, HeadRows
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.engine.engine import AsyncEngine
from ...measure.records.record import machine
from ...measure.simulate.cost_profile import CostProfile, read_cost_profile

RESULTS = Path(__file__).parents[1] / "results" / "headroom.json"
CONTEXT_LEN = 512
# Of a head's tree; rows of a pass that drafts a level.
NUM_LEVELS, LEVEL_ROWS = 6, 10
HEADS = ("griffin", "specformer", "dflash")
# Lower ends of classes of sureness: tokens that the others' tree expects.
SURENESS = (0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Costs(NamedTuple):
    """Seconds of a cost profile.

    steps_s   float64 [1 + nodes]  of a step with 0, 1, ... nodes
    drafts_s  float64 [1 + levels]
    """

    steps_s: Float64
    drafts_s: Float64


class Step(NamedTuple):
    """What a step would have brought, and taken, with 0, 1, ... levels of the head.

    reach     of the step before
    sureness  class of what the others' tree expected
    tokens    float64 [1 + levels]
    seconds   float64 [1 + levels]
    """

    reach: int
    sureness: int
    tokens: Float64
    seconds: Float64


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


async def walked(
    tree_at: Callable[[int], Awaitable[VerifiedTree | None]], head: str, costs: Costs
) -> list[Step]:
    """The steps of one answer.

    tree_at  what all drafters propose behind so many tokens of the answer and one that the target
             says; None where the answer ends
    """
    steps, before, position = list[Step](), 0, 0
    while (tree := await tree_at(position)) is not None:
        tried = [_tried(tree, head, levels, costs) for levels in range(NUM_LEVELS + 1)]
        expected, tokens, seconds = np.array(tried).T
        sureness = int(np.digitize(expected[0], SURENESS))
        steps.append(Step(reach_of(before), sureness, tokens, seconds))
        before = int(tokens[0]) - 1
        position += 1 + before
    return steps


def _tried(
    tree: VerifiedTree, head: str, num_levels: int, costs: Costs
) -> tuple[float, float, float]:
    """Nodes that are expected of a tree with so many of the head's levels, tokens, and seconds."""
    is_there = _there(tree, head, num_levels)
    values = np.where(is_there, tree.values, -1.0)
    # Stable, and a node is worth no more than its parent: parents stay where children do.
    order = np.argsort(-values, kind="stable")[: np.count_nonzero(is_there)]
    sums = np.concatenate([[0.0], values[order].cumsum()])
    seconds = costs.steps_s[: len(sums)] + costs.drafts_s[num_levels]
    count = int(np.argmax((1.0 + sums) / seconds))
    kept = set(order[:count].tolist())
    accepted = next(
        (depth for depth, place in enumerate(tree.path) if place not in kept), len(tree.path)
    )
    return float(sums[count]), 1.0 + accepted, float(seconds[count])


def _there(tree: VerifiedTree, head: str, num_levels: int) -> Bool:
    """Nodes that others proposed, or the head with so many levels, on a path of such nodes."""
    found, depths = np.ones(len(tree.sources), dtype=np.bool_), []
    for place, (parent, source) in enumerate(zip(tree.parents, tree.sources, strict=True)):
        depths.append(1 if parent < 0 else depths[parent] + 1)
        found[place] = source != head or depths[place] <= num_levels
        found[place] &= parent < 0 or found[parent]
    return found


def best_speed(tokens: Float64, seconds: Float64, groups: Int64) -> tuple[float, float]:
    """Most tokens a second, and the share of steps with a draft, where all steps of a group have
    drafts of one depth.

    tokens, seconds  float64 [steps, 1 + levels]
    """
    depths, each = np.zeros(len(tokens), dtype=np.int64), np.arange(len(tokens))
    speed = tokens[:, 0].sum() / seconds[:, 0].sum()
    # Of a ratio of sums the best parts are those of largest tokens less speed times seconds.
    while True:
        for group in np.unique(groups):
            own = groups == group
            depths[own] = np.argmax((tokens[own] - speed * seconds[own]).mean(axis=0))
        better = tokens[each, depths].sum() / seconds[each, depths].sum()
        if better <= speed * (1 + 1e-9):
            return float(speed), float((depths > 0).mean())
        speed = better


def headroom(name: str, temperature: float, head: str, steps: Sequence[Step]) -> Headroom:
    """What rules make of these steps at the times of a profile of this name."""
    tokens = np.array([step.tokens for step in steps])
    seconds = np.array([step.seconds for step in steps])
    reaches = np.array([step.reach for step in steps])
    both = reaches * (len(SURENESS) + 1) + np.array([step.sureness for step in steps])
    alone = tokens[:, 0].sum() / seconds[:, 0].sum()
    known, asked = best_speed(tokens, seconds, both)
    return Headroom(
        name, temperature, head, len(steps), float(tokens[:, 0].mean()),
        best_speed(tokens, seconds, reaches)[0] / alone, known / alone,
        best_speed(tokens, seconds, np.arange(len(steps)))[0] / alone, asked,
    )  # fmt: skip


def costs_of(profile: CostProfile, head: str) -> Costs:
    """The times of a profile."""
    rows = 1 + np.arange(MAX_SHOWN_NODES + 1)
    steps = [profile.stage_s(int(count), CONTEXT_LEN, int(count) * CONTEXT_LEN) for count in rows]
    levels = [profile.draft_s(head, 1 + level, LEVEL_ROWS) for level in range(NUM_LEVELS)]
    return Costs(profile.num_stages * np.array(steps), np.array([0.0, *levels]))


async def measured(
    head: str, profiles: Sequence[CostProfile], prompts: Sequence[str], params: SamplingParams
) -> list[Headroom]:
    """What a bundled head brings at the times of each profile."""
    rows = HeadRows({head: f"demo-{head}"}, (head,), store="demo")
    by_name = {drafter.name: drafter for drafter in rows.drafters()}
    settings = {setting.name: setting.drafters or () for setting in rows.settings()}
    # A node belongs to the first that proposes it, so the head comes last.
    names = *settings[UNTRAINED], f"{head}-{TREE}"
    config = EngineConfig(
        model="demo", drafters=tuple(by_name[name] for name in names), node_budget="full",
        tree_nodes=MAX_SHOWN_NODES, draft_deadline_ms=20_000,
    )  # fmt: skip
    costs = [costs_of(profile, head) for profile in profiles]
    steps: list[list[Step]] = [[] for _ in profiles]
    engine = AsyncEngine(config)
    await engine.start()
    try:
        for prompt in prompts:
            answer = Answer(engine, prompt, params)
            for own, own_costs in zip(steps, costs, strict=True):
                own.extend(await walked(answer.tree_at, names[-1], own_costs))
            # Later answers may copy it.
            await engine.generate(prompt, params, RequestOptions(drafters=names[:-1]))
    finally:
        await engine.close()
    pairs = zip(profiles, steps, strict=True)
    return [headroom(profile.name, params.temperature, head, own) for profile, own in pairs]


class Answer:
    """Trees behind the beginnings of one answer; nobody learns from them."""

    def __init__(self, engine: AsyncEngine, prompt: str, params: SamplingParams) -> None:
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._whole: RequestOutput | None = None
        self._trees: dict[int, VerifiedTree | None] = {}

    async def tree_at(self, position: int) -> VerifiedTree | None:
        """See `walked`."""
        if self._whole is None:
            plain = RequestOptions(speculative=False)
            self._whole = await self._engine.generate(self._prompt, self._params, plain)
        # The target says one, and another behind the tree.
        if position > len(self._whole.token_ids) - 2:
            return None
        if position not in self._trees:
            text = *self._whole.prompt_token_ids, *self._whole.token_ids[:position]
            left = len(self._whole.token_ids) - position
            self._trees[position] = await self._first_tree(text, left)
        return self._trees[position]

    async def _first_tree(self, text: Sequence[int], num_left: int) -> VerifiedTree | None:
        # What draws go by is the place of a token, which is the same.
        params = replace(self._params, max_tokens=num_left)
        options = RequestOptions(explain=True, store=False)
        async with aclosing(self._engine.stream(text, params, options)) as deltas:
            async for delta in deltas:
                if delta.trees:
                    return delta.trees[0]
        return None


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
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
        for head in heads.split(","):
            found += asyncio.run(measured(head, profiles, prompts, params))
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
