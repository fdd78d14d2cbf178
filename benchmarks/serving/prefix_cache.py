"""Time to the first token behind a repeated system prompt, with and without the prefix cache.

    python -m draftline.benchmarks.serving.prefix_cache [--system-tokens 800]

Two engines answer requests that begin with the same tokens and go on differently, in turn: one
shares the KV of equal prefixes, one computes every prompt.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from ...cluster.config import DrafterConfig, EngineConfig
from ...core.request.output import RequestOutput
from ...core.request.sampling_params import SamplingParams
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.engine.engine import Engine
from ...measure.records.record import machine

RESULTS = Path(__file__).parents[1] / "results" / "prefix_cache.json"
QUESTION_TOKENS = 24
PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine; milliseconds to the first token, a request each, the first of all left out."""

    prefix_cache: bool
    first_token_ms: tuple[float, ...]
    cached_tokens: float


def main(
    *,
    system_tokens: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 800,
    requests: Annotated[int, typer.Option(help="Requests of each engine.")] = 24,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Compare the two engines; the texts must be equal."""
    torch.set_num_threads(1)
    found: dict[bool, list[RequestOutput]] = {}
    with _engine(shared=True) as sharing, _engine(shared=False) as computing:
        prompts = _prompts(sharing, system_tokens, requests)
        for prompt in prompts:
            for shared, engine in ((True, sharing), (False, computing)):
                found.setdefault(shared, []).extend(engine.generate([prompt], PARAMS))
    if [a.token_ids for a in found[True]] != [a.token_ids for a in found[False]]:
        raise SystemExit("the answers differ")
    rows = [_row(shared, answers[1:]) for shared, answers in found.items()]
    _print(rows, system_tokens)
    content = {
        "machine": machine().fields(),
        "system_tokens": system_tokens,
        "rows": [asdict(row) for row in rows],
    }
    output.write_text(json.dumps(content, indent=1) + "\n")


def _engine(*, shared: bool) -> Engine:
    drafters = [DrafterConfig(kind="spectra")]
    return Engine(EngineConfig(model="demo", drafters=drafters, enable_prefix_caching=shared))


def _prompts(engine: Engine, system_tokens: int, count: int) -> list[list[int]]:
    """Prompts of the first `system_tokens` held-out tokens, and then of others' own."""
    texts = [engine.tokenizer.encode(prompt.text) for prompt in held_out_prompts()]
    system = [token for text in texts for token in text][:system_tokens]
    # Every question begins with its number, so that no two prompts share more than the system's.
    return [
        [*system, 100 + index, *texts[-1 - index % len(texts)][: QUESTION_TOKENS - 1]]
        for index in range(count)
    ]


def _row(shared: bool, answers: list[RequestOutput]) -> Row:
    metrics = [answer.metrics for answer in answers]
    return Row(
        prefix_cache=shared,
        first_token_ms=tuple(1e3 * (one.first_token_time - one.arrival_time) for one in metrics),
        cached_tokens=statistics.fmean(one.cached_tokens for one in metrics),
    )


def _print(rows: list[Row], system_tokens: int) -> None:
    columns = ("prefix cache", "cached tokens", "median ms", "fastest", "slowest")
    title = f"First token behind {system_tokens} repeated tokens, one thread"
    table = Table(*columns, title=title)
    for row in rows:
        times = row.first_token_ms
        table.add_row(
            "on" if row.prefix_cache else "off",
            f"{row.cached_tokens:.0f}",
            f"{statistics.median(times):.1f}",
            f"{min(times):.1f}",
            f"{max(times):.1f}",
        )
    console = Console(width=100)
    console.print(table)
    on, off = (statistics.median(row.first_token_ms) for row in rows)
    console.print(f"{off / on:.1f} times sooner with the cache; texts equal")
    console.print(machine().line())


if __name__ == "__main__":
    typer.run(main)
