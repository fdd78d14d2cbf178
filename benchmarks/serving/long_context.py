"""Do drafts still pay behind long prompts, and how many are verified there?

    python -m draftline.benchmarks.serving.long_context [--model smollm2] [--contexts 256,2048,7168]
    python -m draftline.benchmarks.serving.long_context --simulate 8b-h100 --contexts 1,16,128

Each prompt is text of this tree cut to so many tokens, which the model continues. A row is one
length of prompts: tokens a second of plain decoding and with the default drafters, behind the
prompt, and how many draft tokens a step verified. With `--simulate` the bundled model runs at the
times of a cost profile whose attention reads and computes so many times as much as its own: the
model's prompts of 800 tokens stand for `1` and more thousand.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ...cluster.config import DrafterConfig, EngineConfig
from ...core.request.output import RequestOutput
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...deploy.engine.async_engine import AsyncEngine
from ...measure.records import machine
from ...measure.simulate.cost_profile import CostProfile, read_cost_profile
from ...measure.simulate.simulation import Simulation

TEXTS = Path(__file__).parents[2] / "docs"
RESULTS = Path(__file__).parents[1] / "results"
# Plain decoding comes first: its answers would be all that the second run needs.
DRAFTERS = (
    DrafterConfig(kind="suffix", answer_tokens=0),
    DrafterConfig(kind="prompt_lookup"),
)
# Tokens of a prompt that stands for a longer one.
SIMULATED_PROMPT = 800
# Of room beside prompt and answer.
SPARE = 64


@dataclass(frozen=True, slots=True)
class ContextRow:
    """What prompts of one length gave.

    context  tokens of the prompts; with a simulation, thousands of them
    plain, drafted  tokens a second behind the first one
    draft_tokens, tau  a step of those with drafts
    """

    context: int
    plain: float
    drafted: float
    draft_tokens: float
    tau: float


def main(
    *,
    model: Annotated[str, typer.Option(help="Target.")] = "smollm2",
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "256,2048,7168",
    prompts: Annotated[int, typer.Option(help="Prompts of each length.")] = 3,
    tokens: Annotated[int, typer.Option(help="New tokens of each.")] = 96,
    simulate: Annotated[str | None, typer.Option(help="A cost profile, for `demo`.")] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "long_context.json",
) -> None:
    """Measure prompts of several lengths."""
    torch.set_num_threads(1)
    console, rows = Console(width=110, highlight=False), []
    for context in map(int, contexts.split(",")):
        profile = None if simulate is None else _stretched(simulate, context)
        length = context if profile is None else SIMULATED_PROMPT
        target = model if profile is None else "demo"
        row = asyncio.run(_measure(target, profile, context, length, prompts, tokens))
        rows.append(row)
        console.print(
            f"{context}: {row.plain:.1f} -> {row.drafted:.1f} tokens/s "
            f"({row.drafted / row.plain:.2f}), {row.draft_tokens:.2f} draft tokens a step, "
            f"tau {row.tau:.2f}"
        )
    what = {"machine": machine().fields(), "model": model, "simulate": simulate, "tokens": tokens}
    output.write_text(json.dumps(what | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    console.print(machine().line())


def _stretched(name: str, times: int) -> CostProfile:
    """A profile whose attention is that of so many times as long texts."""
    profile = read_cost_profile(name)
    target = profile.target
    more = {"kv_bytes": target.kv_bytes * times,
            "attention_operations": target.attention_operations * times}  # fmt: skip
    return profile.model_copy(update={"target": target.model_copy(update=more)})


async def _measure(
    model: str, profile: CostProfile | None, context: int, length: int, prompts: int, tokens: int
) -> ContextRow:
    longest = length + tokens + SPARE
    config = EngineConfig(model=model, drafters=DRAFTERS, max_num_seqs=1, max_model_len=longest,
                          kv_cache_tokens=2 * longest, enable_prefix_caching=False)  # fmt: skip
    simulation = None if profile is None else Simulation(profile)
    if simulation is None:
        engine = AsyncEngine(config)
    else:
        engine = AsyncEngine(
            simulation.config(config),
            pipelines=simulation.pipelines,
            drafters=partial(simulation.drafters, config.drafters),
            engine_time=simulation.time,
        )
    await engine.start()
    try:
        texts = _prompts(engine, prompts, length)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        outputs: dict[bool, list[RequestOutput]] = {
            is_drafted: [
                await engine.generate(text, params, RequestOptions(speculative=is_drafted))
                for text in texts
            ]
            for is_drafted in (False, True)
        }
    finally:
        await engine.close()
    metrics = [one.metrics for one in outputs[True]]
    steps = sum(one.num_steps for one in metrics)
    return ContextRow(
        context,
        _rate(outputs[False]),
        _rate(outputs[True]),
        sum(one.num_draft_tokens for one in metrics) / steps,
        sum(len(one.token_ids) for one in outputs[True]) / steps,
    )


def _prompts(engine: AsyncEngine, count: int, length: int) -> list[Sequence[int]]:
    """Beginnings at several places of the pages, of so many tokens each."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(TEXTS.glob("*.md")))
    ids = engine.tokenizer(text)["input_ids"]
    assert len(ids) >= length, "the pages are too short"
    stride = (len(ids) - length) // count
    return [ids[index * stride : index * stride + length] for index in range(count)]


def _rate(outputs: Sequence[RequestOutput]) -> float:
    seconds = sum(one.metrics.finish_time - one.metrics.first_token_time for one in outputs)
    return sum(len(one.token_ids) - 1 for one in outputs) / seconds


if __name__ == "__main__":
    typer.run(main)
