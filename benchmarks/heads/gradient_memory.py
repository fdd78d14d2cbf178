"""Memory that one training step of a SpecFormer takes, with and without in-batch gradient
accumulation.

    python -m draftline.benchmarks.heads.gradient_memory

Random weights: 8 drafts a row and a vocabulary of 150,000 tokens, as SpecFormer's paper has them
(arXiv 2511.20340). Naively the logits of all drafts, and their gradients, are in memory together;
with accumulation those of one draft. The gradients are compared.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from ...measure.records.record import machine
from ...models.heads.spec_former import SpecFormer, SpecFormerConfig
from ...training.heads.draft_positions import train_positions
from ...training.heads.target import TextBatch
from ..step.peak_memory import peak_bytes, restart_peak

RESULTS = Path(__file__).parents[1] / "results" / "gradient_memory.json"
HIDDEN_SIZE = 256

Learn = Callable[[SpecFormer, nn.Module, nn.Module, TextBatch], object]


def learn_naively(
    drafter: SpecFormer, norm: nn.Module, lm_head: nn.Module, batch: TextBatch
) -> None:
    """The same loss, of all drafts' logits at once."""
    features = batch.features[:, :-1]
    places = torch.arange(features.shape[1]).expand(features.shape[:2])
    context = drafter.context(drafter.project(features), places, _causal)
    logits = lm_head(norm(drafter.drafts(context)))
    losses = []
    for index in range(logits.shape[2]):
        known = batch.tokens.shape[1] - index - 2
        mask = batch.answers[:, index + 2 :]
        rows, tokens = logits[:, :known, index], batch.tokens[:, index + 2 :]
        losses.append(functional.cross_entropy(rows[mask], tokens[mask]))
    torch.stack(losses).mean().backward()


def _causal(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    queries, keys, values = (part.transpose(-3, -2) for part in (queries, keys, values))
    return functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    ).transpose(-3, -2)


class Setup:
    """A drafter of random weights, and a batch of random texts."""

    def __init__(self, draft_length: int, vocab_size: int, num_texts: int, length: int) -> None:
        torch.manual_seed(0)
        config = SpecFormerConfig(
            hidden_size=HIDDEN_SIZE, intermediate_size=688, num_heads=4, num_kv_heads=2,
            head_dim=64, draft_length=draft_length, rms_norm_eps=1e-6, max_positions=1024,
            rope={"rope_type": "default", "rope_theta": 10000.0},
        )  # fmt: skip
        self.drafter = SpecFormer(config)
        self.norm = nn.RMSNorm(HIDDEN_SIZE).requires_grad_(requires_grad=False)
        self.lm_head = nn.Linear(HIDDEN_SIZE, vocab_size, bias=False)
        self.lm_head.requires_grad_(requires_grad=False)
        width = HIDDEN_SIZE * len(config.layers_of(6))
        shape = (num_texts, length)
        features = torch.randn(*shape, width)
        self.batch = TextBatch(
            torch.randint(vocab_size, shape),
            features,
            torch.ones(shape, dtype=torch.bool),
            features[..., -HIDDEN_SIZE:],
        )

    def gradients(self, learn: Learn) -> Tensor:
        """All gradients of one step, side by side."""
        self.drafter.zero_grad(set_to_none=True)
        learn(self.drafter, self.norm, self.lm_head, self.batch)
        parts = [
            parameter.grad.flatten()
            for parameter in self.drafter.parameters()
            if parameter.grad is not None
        ]
        return torch.cat(parts)

    def measured(self, learn: Learn) -> tuple[int, float]:
        """Bytes that a step takes at most beside what was there, and its seconds."""
        before = restart_peak()
        began_at = time.perf_counter()
        self.gradients(learn)
        return peak_bytes() - before, time.perf_counter() - began_at


def main(
    *,
    draft_length: Annotated[int, typer.Option(help="Drafts of a row.")] = 8,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 150_000,
    num_texts: Annotated[int, typer.Option(help="Texts of the step.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens of each.")] = 64,
    rounds: Annotated[int, typer.Option(help="Times that each way runs.")] = 3,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Measure, print, write."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(1)
    setup = Setup(draft_length, vocab_size, num_texts, length)
    ways: dict[str, Learn] = {"naive": learn_naively, "accumulated": train_positions}
    naive, accumulated = (setup.gradients(learn) for learn in ways.values())
    difference = float((naive - accumulated).abs().max() / naive.abs().max())
    found = {name: [setup.measured(learn) for _ in range(rounds)] for name, learn in ways.items()}
    content = {
        "machine": machine().fields(), "draft_length": draft_length, "vocab_size": vocab_size,
        "rows": num_texts * (length - 1), "largest_relative_difference": difference,
        "peak_bytes": {name: [one for one, _ in runs] for name, runs in found.items()},
        "seconds": {name: [one for _, one in runs] for name, runs in found.items()},
    }  # fmt: skip
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, runs in found.items():
        sizes = [one / 2**20 for one, _ in runs]
        seconds = statistics.median(one for _, one in runs)
        console.print(
            f"{name}: {statistics.median(sizes):,.0f} MiB ({min(sizes):,.0f} - {max(sizes):,.0f}),"
            f" {seconds:.1f} s a step"
        )
    medians = [statistics.median(one for one, _ in runs) for runs in found.values()]
    console.print(
        f"peak ratio {medians[0] / medians[1]:.1f}, gradients differ by {difference:.1e} of the "
        "largest"
    )
    console.print(machine().line())


if __name__ == "__main__":
    typer.run(main)
