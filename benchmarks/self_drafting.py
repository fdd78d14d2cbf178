"""Whether a target can draft from its own layers: `python -m draftline.benchmarks.self_drafting`.

For texts that it said greedily (a folder of `draftline train data`), the share of tokens that it
would have said, too, if it had ended after its first layers (early exit, with its own last norm and
output head), or without some layers in the middle (layer skipping). Beside each share stand the
cost of such a draft, in passes, and the speed-up over plain decoding of the best chain, if drafts
took no other time and each were as often right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ..models.load.checkpoint import resolve_model_path
from ..training.heads.distilled_texts import DistilledText, read_texts

OUTPUT = Path(__file__).parent / "results" / "self_drafting.json"
LONGEST_CHAIN = 16


class SelfDrafts:
    """A target and texts of it."""

    def __init__(self, model: str, texts: Sequence[DistilledText], window: int) -> None:
        whole: Any = AutoModelForCausalLM.from_pretrained(
            resolve_model_path(model), dtype=torch.float32
        )
        self._model, self._texts, self._window = whole.eval(), texts, window
        self.layers = list(whole.model.layers)
        one = sum(weight.numel() for weight in self.layers[0].parameters())
        self._of_head = whole.lm_head.weight.numel() / one

    def cost(self, num_layers: int) -> float:
        """Weights that a draft of so many layers reads, of those of a pass."""
        return (num_layers + self._of_head) / (len(self.layers) + self._of_head)

    @torch.no_grad()
    def right_after_exit(self) -> Iterator[tuple[int, float]]:
        """Numbers of first layers, with the share of tokens that these alone would have said."""
        counts, total = torch.zeros(len(self.layers) + 1, dtype=torch.int64), 0
        for ids, said, wanted in self._rows():
            states = self._model.model(ids, use_cache=False, output_hidden_states=True)
            total += len(wanted)
            for layer, state in enumerate(states.hidden_states):
                # transformers norms the last one.
                normed = state if layer == len(self.layers) else self._model.model.norm(state)
                best = self._model.lm_head(normed[0, :-1][said]).argmax(-1)
                counts[layer] += (best == wanted).sum()
        yield from ((layer, int(count) / total) for layer, count in enumerate(counts) if layer)

    @torch.no_grad()
    def right_without(self, skipped: range) -> float:
        """The share of tokens that it would have said without these layers."""
        kept = [layer for place, layer in enumerate(self.layers) if place not in skipped]
        body, config = self._model.model, self._model.config
        body.layers, config.num_hidden_layers = nn.ModuleList(kept), len(kept)
        right = total = 0
        for ids, said, wanted in self._rows():
            state = body(ids, use_cache=False).last_hidden_state
            best = self._model.lm_head(state[0, :-1][said]).argmax(-1)
            right, total = right + int((best == wanted).sum()), total + len(wanted)
        body.layers, config.num_hidden_layers = nn.ModuleList(self.layers), len(self.layers)
        return right / total

    def _rows(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each text its tokens int64 [1, n], the rows before tokens that it said, and these."""
        for text in self._texts:
            ids = torch.tensor(text.tokens[: self._window])
            said = torch.from_numpy(text.said()[: self._window])[1:]
            yield ids[None], said, ids[1:][said]


def speedup(right: float, cost: float) -> float:
    """Of the best chain: its tokens over plain decoding, by what its drafts and the pass cost."""
    tokens, best = 1.0, 1.0
    for length in range(1, LONGEST_CHAIN + 1):
        tokens += right**length
        best = max(best, tokens / (1 + length * cost))
    return best


def main(
    texts: Annotated[Path, typer.Option(help="Folder of `train data --temperature 0`.")],
    model: Annotated[str, typer.Option(help="Target that said them.")] = "smollm2",
    num_texts: Annotated[int, typer.Option(help="Of the folder.", min=1)] = 10,
    window: Annotated[int, typer.Option(help="Most tokens of a text.", min=8)] = 400,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = OUTPUT,
) -> None:
    """Print and write a row for each early exit and for layers left out in the middle."""
    torch.set_num_threads(1)
    drafts = SelfDrafts(model, read_texts(texts)[:num_texts], window)
    rows: list[dict[str, Any]] = []

    def add(name: str, right: float, num_layers: int) -> None:
        cost = drafts.cost(num_layers)
        row = {"right": round(right, 3), "cost": round(cost, 3)}
        rows.append({"draft": name, **row, "speedup": round(speedup(right, cost), 3)})
        typer.echo(json.dumps(rows[-1]))

    depth = len(drafts.layers)
    for num_layers, right in drafts.right_after_exit():
        add(f"exit after {num_layers} of {depth} layers", right, num_layers)
    for count in (2, 4, 8, 12):
        for first in range(4, depth - count - 1, 4):
            skipped = range(first, first + count)
            right = drafts.right_without(skipped)
            add(f"without layers {first} to {first + count - 1}", right, depth - count)
    output.write_text(json.dumps({"model": model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
