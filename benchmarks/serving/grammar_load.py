"""What a worst-case grammar costs the others: plain streams with and without one beside them.

    python -m draftline.benchmarks.serving.grammar_load

Streams of the demo model in this process; runs with and without constrained requests take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence

from ... import AsyncEngine, EngineConfig, SamplingParams
from ...core.errors import RequestError
from ...core.request.constraint import StructuredOutput
from ...deploy.cli.demo.held_out_prompts import held_out_prompts

AMBIGUOUS = 'start: s\ns: "a" | s s | s s s | s s s s | s s s s s'
WIDE = json.dumps(
    {
        "anyOf": [
            {
                "type": "object",
                "properties": {f"k{i}": {"type": "string"}, f"j{i}": {"type": "integer"}},
                "required": [f"k{i}"],
            }
            for i in range(400)
        ]
    }
)
CHOICES = json.dumps([f"text number {index} {index * 7919}" for index in range(20_000)])
# The first is what any ninth stream costs the other eight.
FORMS: dict[str, StructuredOutput | None] = {
    "no form": None,
    "ambiguous": StructuredOutput(kind="grammar", value=AMBIGUOUS),
    "any_of_400": StructuredOutput(kind="json", value=WIDE),
    "choice_20000": StructuredOutput(kind="choice", value=CHOICES),
}


async def plain_rate(engine: AsyncEngine, num_streams: int, num_tokens: int) -> float:
    """Tokens per second of plain streams together."""
    prompts = [prompt.text for prompt in held_out_prompts(num_streams)]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    outputs = await asyncio.gather(*(engine.generate(one, params) for one in prompts))
    return sum(len(out.token_ids) for out in outputs) / (time.perf_counter() - began)


async def keep_constrained(
    engine: AsyncEngine, form: StructuredOutput | None, counts: list[int]
) -> None:
    """One constrained request after the other; those that exceed a limit end with an error."""
    params = SamplingParams(max_tokens=300, min_tokens=200, temperature=1.0, structured_output=form)
    while True:
        try:
            async for delta in engine.stream("x = ", params):
                counts[0] += len(delta.token_ids)
        except RequestError:
            counts[1] += 1


async def beside(
    engine: AsyncEngine, form: StructuredOutput | None, num_streams: int, num_tokens: int
) -> tuple[float, list[int]]:
    """The plain rate beside constrained requests, and these requests' tokens and errors."""
    counts = [0, 0]
    task = asyncio.create_task(keep_constrained(engine, form, counts))
    await asyncio.sleep(0.5)
    try:
        return await plain_rate(engine, num_streams, num_tokens), counts
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def measure(args: argparse.Namespace) -> None:
    """Print what each form leaves of the plain rate."""
    config = EngineConfig(model="demo", max_num_seqs=args.streams + 1)
    engine = AsyncEngine(config)
    await engine.start()
    try:
        await plain_rate(engine, args.streams, 32)
        for name, form in FORMS.items():
            ratios: list[float] = []
            rates: list[float] = []
            counts = [0, 0]
            for _ in range(args.rounds):
                alone = await plain_rate(engine, args.streams, args.tokens)
                with_form, counts = await beside(engine, form, args.streams, args.tokens)
                ratios.append(with_form / alone)
                rates.append(alone)
            print(_line(name, ratios, rates, counts), flush=True)
    finally:
        await engine.close()


def _line(name: str, ratios: Sequence[float], rates: Sequence[float], counts: Sequence[int]) -> str:
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    return (
        f"{name:14} keeps {statistics.median(ratios):.2f} of the plain rate ({spread}); "
        f"plain {statistics.median(rates):.0f} tokens/s; the last round's constrained tokens "
        f"{counts[0]}, errors {counts[1]}"
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="of each plain stream")
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
