"""How often a draft's first token can be expected to be accepted, from whole distributions.

    python -m draftline.benchmarks.model_drafters.acceptance

Along texts that the target said: the sum of min(p, q) under rejection, the chance that both choose
the same token with the same noise under `coupled` (greedy: that their most probable ones agree).
TLI's q is over the shared tokens (Timor et al., arXiv 2502.05202).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM

from ...cluster.config import EngineConfig
from ...core.arrays import Float64
from ...core.request.sampling_params import SamplingParams
from ...deploy.cli.demo.prompts import held_out_prompts
from ...deploy.engine.engine import Engine
from ...deploy.ray_serve.runtime import quiet_libraries
from ...drafters.model.vocabulary.strategy import Translation
from ...drafters.model.vocabulary.surfaces import map_vocabularies, read_vocabulary
from ...measure.records.record import machine
from ...models.load.bundled import demo_path

RESULTS = Path(__file__).parents[1] / "results" / "models-acceptance.json"
# Draws of the noise for each token of a text.
NUM_DRAWS = 16


@dataclass(slots=True)
class AcceptanceRow:
    """Expected acceptance by temperature, of a row of the suite."""

    name: str
    expected: dict[str, float] = field(default_factory=dict)


class Model:
    """Logits of a bundled model along a text, float64."""

    def __init__(self, name: str) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(demo_path(name), dtype=torch.float32)
        self._model = loaded.eval()
        self.size = loaded.config.vocab_size

    def logits(self, tokens: Sequence[int]) -> Float64:
        """[tokens, ids]"""
        with torch.inference_mode():
            return self._model(torch.tensor([list(tokens)])).logits[0].double().numpy()


class Pair:
    """Logits of the target and of its drafters behind each token of a text, over target ids."""

    def __init__(self) -> None:
        self.target, self.same = Model("demo"), Model("demo-drafter")
        self.other = Model("demo-drafter-other-vocab")
        draft = read_vocabulary(demo_path("demo-drafter-other-vocab"), self.other.size)
        target = read_vocabulary(demo_path("demo"), self.target.size)
        self._shared = map_vocabularies(draft, target, self.other.size, self.target.size)
        self._translation = Translation(self._shared, draft, target)

    def tli(self, tokens: Sequence[int]) -> Float64:
        """Minus infinity outside of what both have."""
        logits = self._other(tokens)
        found = np.full((len(tokens), self.target.size), -np.inf)
        found[:, self._shared.target_ids] = logits[:, self._shared.draft_ids]
        return found

    def _other(self, tokens: Sequence[int]) -> Float64:
        own: list[int] = []
        ends: list[int] = []
        for token in tokens:
            own += self._translation.of(token)
            ends.append(len(own) - 1)
        return self.other.logits(own)[ends]


def softmax(logits: Float64, temperature: float) -> Float64:
    """[rows, ids] at a temperature above 0."""
    scaled = logits / temperature
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def rejected(p: Float64, q: Float64, temperature: float) -> Float64:
    """[rows]: the sum of min(p, q)."""
    size = p.shape[1]
    both = np.minimum(softmax(p, temperature), softmax(q, temperature)[:, :size])
    return both.sum(axis=1)


def coupled(p: Float64, q: Float64, temperature: float, rng: np.random.Generator) -> Float64:
    """[rows]: the share of draws of the noise in which both choose the same token."""
    if not temperature:
        return (p.argmax(axis=1) == q.argmax(axis=1)).astype(np.float64)
    size = p.shape[1]
    hits = np.zeros(len(p))
    for _ in range(NUM_DRAWS):
        noise = rng.gumbel(size=q.shape)
        ours = (p / temperature + noise[:, :size]).argmax(axis=1)
        hits += ours == (q / temperature + noise).argmax(axis=1)
    return hits / NUM_DRAWS


def said(num_prompts: int, max_tokens: int, temperature: float) -> Iterator[tuple[list[int], int]]:
    """Prompts with what the target answers, and how long the prompt is."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=True)
    with Engine(EngineConfig(model="demo", drafters=())) as engine:
        for prompt in held_out_prompts(num_prompts):
            [output] = engine.generate([prompt.text], params)
            yield [*output.prompt_token_ids, *output.token_ids], len(output.prompt_token_ids)


def expected(
    pair: Pair, texts: Sequence[tuple[list[int], int]], temperature: float
) -> dict[str, float]:
    """By the suite's names of rows, a mean over the answers' tokens."""
    rng = np.random.default_rng(0)
    found: dict[str, list[Float64]] = {}
    for tokens, prompt_len in texts:
        answered = slice(prompt_len - 1, len(tokens) - 1)
        p = pair.target.logits(tokens)[answered]
        by_row = {
            "same chain": pair.same.logits(tokens),
            "TLI chain": pair.tli(tokens),
        }
        for name, logits in by_row.items():
            q = logits[answered]
            found.setdefault(name, []).append(coupled(p, q, temperature, rng))
            if temperature:
                ruled = "chain, rejection" if name == "same chain" else f"{name}, rejection"
                found.setdefault(ruled, []).append(rejected(p, q, temperature))
    return {name: float(np.concatenate(rows).mean()) for name, rows in found.items()}


def main(
    *,
    num_prompts: Annotated[int, typer.Option(help="Bundled prompts.")] = 33,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    temperatures: Annotated[str, typer.Option(help="Temperatures.")] = "0,0.7,1",
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Compute, print, write."""
    quiet_libraries()
    torch.set_num_threads(1)
    console = Console(width=110, highlight=False)
    pair = Pair()
    rows: dict[str, AcceptanceRow] = {}
    for temperature in map(float, temperatures.split(",")):
        texts = list(said(num_prompts, max_tokens, temperature))
        for name, value in expected(pair, texts, temperature).items():
            rows.setdefault(name, AcceptanceRow(name)).expected[f"{temperature:g}"] = value
            console.print(f"T {temperature:g}  {name}: {value:.3f}")
    content = {
        "machine": machine().fields(), "num_prompts": num_prompts, "max_tokens": max_tokens,
        "rows": [asdict(row) for row in rows.values()],
    }  # fmt: skip
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
