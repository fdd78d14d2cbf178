"""How much of a drafter's time is hidden behind the target's, with and without drafting ahead.

    python -m draftline.benchmarks.model_drafters.hidden_share

Real drafts and answers of the demo models over simulated stages: a step takes 30 ms over 4 stages,
the drafter 3 ms a token on a device of its own. Its time is hidden while a stage works. How much
of the waiting goes away is told beside it, for what is drafted in vain is hidden, too.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ...cluster.config import DrafterConfig, EngineConfig
from ...cluster.links.pool import AnyLink
from ...core.arrays import Span
from ...core.request.sampling_params import SamplingParams
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.engine.engine import AsyncEngine
from ...deploy.ray_serve.runtime import quiet_libraries
from ...measure.records.record import machine
from ...measure.simulate.apart_link import ApartLink
from ...measure.simulate.cost_profile import CostProfile
from ...measure.simulate.draft_times import DraftTimes
from ...measure.simulate.simulation import Simulation
from ..step_events import read_rows

# What drafts, by the name that the results have for it.
DEMO_DRAFTER = "demo-drafter"
DRAFTERS: Mapping[str, DrafterConfig] = {
    DEMO_DRAFTER: DrafterConfig(kind="model", model="demo-drafter", num_tokens=4),
    "demo in int8": DrafterConfig(kind="model", model="demo", weights="int8", num_tokens=4),
}
RESULTS = Path(__file__).parents[1] / "results"
STAGES, STEP_S, DRAFT_S = 4, 0.030, 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`together` requests at once, at a temperature.

    drafter   of `DRAFTERS`
    outcomes  that it drafts ahead behind; 0: it does not
    """

    drafter: str
    together: int
    temperature: float
    outcomes: int


def every_case(drafter: str) -> Iterator[Case]:
    """One request at a time behind ever more outcomes; four together, whose steps overlap."""
    counts = {1: (0, 1, 4, 16, 32, 64), 4: (0, 16)}
    if drafter != DEMO_DRAFTER:
        # It agrees, so that few outcomes are probable.
        counts = {1: (0, 1, 4)}
    for together, every in counts.items():
        for temperature in (0.0, 1.0):
            for outcomes in every:
                yield Case(
                    drafter=drafter, together=together, temperature=temperature, outcomes=outcomes
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one case; times are the simulation's.

    hidden      share of the drafter's time in which a stage worked
    wait_ms     that the engine waited for the drafter, a committed token
    draft_ms    that the drafter worked, a committed token
    tokens_s    committed a second, of all requests together
    """

    case: Case
    hidden: float
    wait_ms: float
    draft_ms: float
    tau: float
    tokens_s: float
    ahead: int
    ahead_used: int


def profile() -> CostProfile:
    """The machine: nothing but the times that are given counts."""
    no_time = {"bytes": 1.0, "operations": 1.0}
    return CostProfile.model_validate(
        {
            "name": "30 ms a step over 4 stages, drafter 3 ms a token",
            "num_stages": STAGES,
            "device": {
                "bandwidth": 1e15, "bandwidth_share": 1, "operations": 1e15, "operations_share": 1,
                "attention_share": 1,
            },
            "target": no_time | {"pass_s": STEP_S / STAGES},
            "drafters": {"model": no_time | {"pass_s": DRAFT_S}},
            "sources": {},
        }
    )  # fmt: skip


async def run(case: Case, prompts: Sequence[str], max_tokens: int, trace: Path) -> Found:
    """Answer all prompts, `together` at once."""
    simulation = Simulation(profile())
    apart: list[ApartLink] = []

    def links(given: Sequence[AnyLink]) -> list[AnyLink]:
        apart[:] = [
            ApartLink(
                link,
                DraftTimes(simulation.profile, "model"),
                simulation.clock,
                drafts_ahead=case.outcomes > 0,
            )
            for link in given
        ]
        return [*apart]

    drafter = DRAFTERS[case.drafter].model_dump() | {"ahead_outcomes": max(case.outcomes, 1)}
    config = EngineConfig(
        model="demo",
        drafters=(DrafterConfig(**drafter),),
        node_budget="full",
        trace_steps=trace,
    )
    engine = AsyncEngine(
        simulation.config(config),
        pipelines=simulation.pipelines,
        links=links,
        engine_time=simulation.time,
    )
    params = SamplingParams(
        max_tokens=max_tokens, temperature=case.temperature, seed=1, ignore_eos=True
    )
    await engine.start()
    try:
        for first in range(0, len(prompts), case.together):
            group = prompts[first : first + case.together]
            await asyncio.gather(*(engine.generate(prompt, params) for prompt in group))
        [stats] = engine.stats().drafters
    finally:
        await engine.close()
    rows = read_rows(trace)
    commits = [one for one in rows["host"] if one.name == "commit" and one.args["requests"]]
    asks = [one for one in rows["host"] if one.name == "ask"]
    stages = (row for name, row in rows.items() if name.startswith("stage "))
    busy = merged([one.span for row in stages for one in row if one.name != "prompt"])
    drafts = apart[0].spans
    worked = sum(end - begin for begin, end in drafts)
    tokens = sum(commit.args["tokens"] for commit in commits)
    return Found(
        case=case,
        hidden=sum(overlap(draft, busy) for draft in drafts) / worked,
        wait_ms=1e-3 * sum(ask.args["waited_us"] for ask in asks) / tokens,
        draft_ms=1e3 * worked / tokens,
        tau=tokens / sum(commit.args["requests"] for commit in commits),
        tokens_s=tokens / (commits[-1].span[1] - asks[0].span[0]),
        ahead=stats.ahead,
        ahead_used=stats.ahead_used,
    )


def merged(spans: Sequence[Span]) -> list[Span]:
    """The times that any of these covers, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(span: Span, busy: Sequence[Span]) -> float:
    """Seconds of a span within any of these."""
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in busy)


def left_of_waiting(one: Found, found: Sequence[Found]) -> float:
    """What the engine still waits a token, as a share of what it waits without drafts ahead."""
    off = replace(one.case, outcomes=0)
    return one.wait_ms / next(other.wait_ms for other in found if other.case == off)


def show(found: Sequence[Found], console: Console) -> None:
    """Print a line a case, and what drafting ahead changes."""
    table = Table(
        "drafter", "requests", "T", "outcomes", "hidden", "waited ms a token", "of the waiting",
        "drafted ms a token", "tau", "tokens/s", "used", box=None,
    )  # fmt: skip
    for one in found:
        case = one.case
        table.add_row(
            case.drafter, str(case.together), f"{case.temperature:g}", str(case.outcomes or "off"),
            f"{one.hidden:.0%}", f"{one.wait_ms:.2f}", f"{left_of_waiting(one, found):.0%}",
            f"{one.draft_ms:.2f}", f"{one.tau:.2f}", f"{one.tokens_s:.1f}",
            f"{one.ahead_used} of {one.ahead}",
        )  # fmt: skip
    console.print(table)


def main(
    *,
    drafter: Annotated[str, typer.Option(help=f"One of {', '.join(DRAFTERS)}.")] = (DEMO_DRAFTER),
    num_prompts: Annotated[int, typer.Option(help="Bundled prompts.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 48,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS
    / "hidden_share.json",
) -> None:
    """Measure, print, write in place of what the results have of this drafter."""
    quiet_libraries()
    console = Console(width=150, highlight=False)
    prompts = [prompt.text for prompt in held_out_prompts(num_prompts)]
    cases = list(every_case(drafter))
    results: list[Found] = []
    with tempfile.TemporaryDirectory() as folder:
        for index, case in enumerate(cases):
            trace = Path(folder) / f"{index}.json"
            results.append(asyncio.run(run(case, prompts, max_tokens, trace)))
    show(results, console)
    console.print(machine().line())
    content = json.loads(output.read_text("utf-8")) if output.exists() else {}
    content[drafter] = {
        "machine": machine().fields(), "stages": STAGES, "step_ms": 1e3 * STEP_S,
        "draft_ms_a_pass": 1e3 * DRAFT_S, "num_prompts": num_prompts,
        "max_tokens": max_tokens, "cases": [asdict(one) for one in results],
    }  # fmt: skip
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
