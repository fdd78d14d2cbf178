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
from ...cluster.engine.trace_file import read_trace
from ...cluster.links.pool import AnyLink
from ...core.arrays import Span
from ...core.request.sampling_params import SamplingParams
from ...core.step.trace import StepRecord
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.cli.trace.plot import draw_trace
from ...deploy.cli.trace.summary import summarise
from ...deploy.engine.engine import AsyncEngine
from ...deploy.ray_serve.runtime import quiet_libraries
from ...measure.records.record import machine
from ...measure.simulate.apart_link import ApartLink, DraftSpan
from ...measure.simulate.cost_profile import CostProfile
from ...measure.simulate.draft_times import DraftTimes
from ...measure.simulate.simulation import Simulation

# What drafts, by the name that the results have for it.
DRAFTERS: Mapping[str, DrafterConfig] = {
    "demo-drafter": DrafterConfig(kind="model", model="demo-drafter", num_tokens=4),
    "demo in int8": DrafterConfig(kind="model", model="demo", weights="int8", num_tokens=4),
}
RESULTS = Path(__file__).parents[1] / "results"
STAGES, STEP_S, DRAFT_S = 4, 0.030, 0.003
# Steps of the picture.
DRAWN = 16


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


# That of the picture.
DRAWN_CASE = Case(drafter="demo-drafter", together=1, temperature=0.0, outcomes=32)


def every_case(drafter: str) -> Iterator[Case]:
    """One request at a time behind ever more outcomes; four together, whose steps overlap."""
    counts = {1: (0, 1, 4, 16, 32, 64), 4: (0, 16)}
    if drafter != DRAWN_CASE.drafter:
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


async def run(
    case: Case, prompts: Sequence[str], max_tokens: int, trace: Path
) -> tuple[Found, list[StepRecord], list[DraftSpan]]:
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
    records = [record for record in read_trace(trace) if record.requests]
    drafts = apart[0].spans
    busy = merged([span for record in records for span in record.stages])
    worked = sum(end - begin for begin, end in (draft.span for draft in drafts))
    tokens = sum(record.tokens for record in records)
    seconds = records[-1].committed_at - records[0].planned_at
    found = Found(
        case=case,
        hidden=sum(overlap(draft.span, busy) for draft in drafts) / worked,
        wait_ms=1e3 * sum(record.draft_wait_s for record in records) / tokens,
        draft_ms=1e3 * worked / tokens,
        tau=tokens / sum(record.requests for record in records),
        tokens_s=tokens / seconds,
        ahead=stats.ahead,
        ahead_used=stats.ahead_used,
    )
    return found, records, drafts


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


def draw(records: Sequence[StepRecord], drafts: Sequence[DraftSpan], png: Path) -> None:
    """The time line of some steps in the middle."""
    middle = len(records) // 2
    shown = records[middle : middle + DRAWN]
    begin, end = shown[0].planned_at, shown[-1].committed_at
    inside = [draft for draft in drafts if begin <= draft.span[0] and draft.span[1] <= end]
    lanes = {
        "drafting": [draft.span for draft in inside if not draft.is_ahead],
        "drafting ahead": [draft.span for draft in inside if draft.is_ahead],
    }
    draw_trace(shown, summarise(shown), png, lanes)


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
    drafter: Annotated[str, typer.Option(help=f"One of {', '.join(DRAFTERS)}.")] = (
        DRAWN_CASE.drafter
    ),
    num_prompts: Annotated[int, typer.Option(help="Bundled prompts.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 48,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS
    / "hidden_share.json",
    plot: Annotated[Path | None, typer.Option(help="PNG of the time line.")] = None,
) -> None:
    """Measure, print, write in place of what the results have of this drafter."""
    quiet_libraries()
    console = Console(width=150, highlight=False)
    prompts = [prompt.text for prompt in held_out_prompts(num_prompts)]
    cases = list(every_case(drafter))
    results: list[Found] = []
    with tempfile.TemporaryDirectory() as folder:
        for index, case in enumerate(cases):
            trace = Path(folder) / f"{index}.jsonl"
            found, records, drafts = asyncio.run(run(case, prompts, max_tokens, trace))
            results.append(found)
            if plot is not None and case == DRAWN_CASE:
                draw(records, drafts, plot)
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
