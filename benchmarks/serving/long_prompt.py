"""What a long prompt does to answers of the demo model that are being generated.

    python -m draftline.benchmarks.serving.long_prompt [--prompt-tokens 16384] [--streams 8]

Streams of answers run without end in one engine with the default drafters; then a long prompt
comes. Its length is beyond what the model was trained on, which changes nothing but its text.
`benchmarks/step/long_prompt.py` does the same over simulated stages.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console

from ...cluster.config import EngineConfig
from ...core.request.sampling_params import SamplingParams
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.engine.engine import AsyncEngine
from ...measure.records.record import machine
from ...models.load.checkpoint import resolve_model_path
from ..step.decode import DRAFTERS

RESULTS = Path(__file__).parents[1] / "results" / "long_prompt_demo.json"
ANSWER_TOKENS = 256
ALONE_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One long prompt.

    first_token_s  from its arrival
    alone, beside  p50 and p99 of the time between two deltas of a stream, ms: before it came, and
                   while it was read
    """

    share: float
    first_token_s: float
    alone: tuple[float, float]
    beside: tuple[float, float]

    @property
    def ratio(self) -> float:
        """The p99 beside the prompt over that without it."""
        return self.beside[1] / self.alone[1]


def main(
    prompt_tokens: Annotated[int, typer.Option(help="Of the long prompt.")] = 16384,
    streams: Annotated[int, typer.Option(help="Answers that are generated meanwhile.")] = 8,
    rounds: Annotated[int, typer.Option(help="Long prompts, one after the other.")] = 2,
    shares: Annotated[str, typer.Option(help="Values of prefill_share.")] = "0.35,1",
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Measure the time between tokens beside a long prompt."""
    torch.set_num_threads(1)
    console = Console(width=110)
    found = []
    with long_demo(2 * prompt_tokens) as model:
        for share in map(float, shares.split(",")):
            for one in asyncio.run(_measured(model, share, prompt_tokens, streams, rounds)):
                console.print(
                    f"prefill_share {share:g}: p99 {one.alone[1]:.1f} ms alone, "
                    f"{one.beside[1]:.1f} beside ({one.ratio:.2f}); p50 {one.alone[0]:.1f}, "
                    f"{one.beside[0]:.1f}; prompt of {prompt_tokens} read in "
                    f"{one.first_token_s:.1f} s"
                )
                found.append({**asdict(one), "ratio": one.ratio})
    content = {
        "machine": machine().fields(), "prompt_tokens": prompt_tokens, "streams": streams,
        "rounds": found,
    }  # fmt: skip
    output.write_text(json.dumps(content, indent=1) + "\n")
    console.print(machine().line())


@contextmanager
def long_demo(positions: int) -> Iterator[str]:
    """A copy of the demo model that takes so many positions."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "demo"
        shutil.copytree(resolve_model_path("demo"), copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(
            json.dumps({**config, "max_position_embeddings": positions})
        )
        yield str(copy)


async def _measured(
    model: str, share: float, prompt_tokens: int, streams: int, rounds: int
) -> list[Round]:
    engine = AsyncEngine(
        EngineConfig(
            model=model,
            prefill_share=share,
            kv_cache_tokens=2 * prompt_tokens,
            drafters=[DRAFTERS[name] for name in ("suffix", "prompt_lookup")],
        )
    )
    await engine.start()
    gaps: list[float] = []
    running = [asyncio.create_task(_answers(engine, index, gaps)) for index in range(streams)]
    await asyncio.sleep(ALONE_S)
    found = []
    for number in range(rounds):
        gaps.clear()
        await asyncio.sleep(ALONE_S)
        alone = _percentiles(gaps)
        gaps.clear()
        start = time.perf_counter()
        await _read(engine, prompt_tokens, number)
        seconds = time.perf_counter() - start
        found.append(
            Round(share=share, first_token_s=seconds, alone=alone, beside=_percentiles(gaps))
        )
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await engine.close()
    return found


async def _answers(engine: AsyncEngine, index: int, gaps: list[float]) -> None:
    """One answer after the other; the time between two deltas of one."""
    prompts = held_out_prompts()
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    while True:
        index += 1
        before = None
        async for _ in engine.stream(prompts[index % len(prompts)].text, params):
            now = time.perf_counter()
            if before is not None:
                gaps.append(1e3 * (now - before))
            before = now


async def _read(engine: AsyncEngine, prompt_tokens: int, number: int) -> None:
    """A prompt that no block is known of."""
    ids = np.random.default_rng(number).integers(100, 4000, prompt_tokens)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    await engine.generate(ids.tolist(), params)


def _percentiles(gaps: list[float]) -> tuple[float, float]:
    median, late = np.percentile(gaps, [50, 99])
    return float(median), float(late)


if __name__ == "__main__":
    typer.run(main)
