"""Memory and time of a model drafter by how its weights are kept.

    python -m draftline.benchmarks.drafters.weights

Texts are the bundled held-out prompts; a draft's time is the median of twenty, of one thread's
processor time, which does not count what other programs take. Tokens are compared with those of
the plain weights, which also run on draftline's own operators, as they do where nothing is asked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from ...core.proposals import Commit, DraftRequest, Query
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.ray_serve.runtime import quiet_libraries
from ...drafters.model.drafter import ModelDrafter, load_model_drafter
from ...drafters.model.options import AUTO_WEIGHTS, WEIGHTS, ModelOptions
from ...measure.records.record import machine
from ...measure.report.marked_part import markdown_table
from ...models.layers.fast_modules import FastLinear
from ...models.stage.stage import Stage
from ...models.text.tokenizer import load_tokenizer

RESULTS = Path(__file__).parents[1] / "results" / "drafter_weights.json"
ROUNDS = 24
WARM = 4
MAX_NODES = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One way to keep a model's weights.

    compile       own operators where it is `auto`
    bytes         of all weights, and of those of the decoder layers alone
    ms            of processor time, of a draft for all streams
    equal         share of drafted tokens that plain weights draft, too
    """

    model: str
    weights: str
    compile: str
    bytes: int
    layer_bytes: int
    ms: float
    equal: float


def rows(model: str, num_streams: int) -> Iterator[Row]:
    """A model's rows, its plain weights first."""
    plain: list[list[int]] = []
    for weights, compiled in ((AUTO_WEIGHTS, "auto"), *((one, "off") for one in WEIGHTS)):
        options = ModelOptions(device="cpu", weights=weights, compile=compiled)
        drafter = load_model_drafter(model, options=options)
        drafts, milliseconds = drafted(drafter, model, num_streams)
        whole, layers = weight_bytes(drafter)
        plain = plain or drafts
        pairs = [
            pair
            for one, other in zip(drafts, plain, strict=True)
            for pair in zip(one, other, strict=False)
        ]
        equal = sum(one == other for one, other in pairs) / len(pairs)
        yield Row(model, weights, compiled, whole, layers, milliseconds, equal)


def drafted(drafter: ModelDrafter, model: str, num_streams: int) -> tuple[list[list[int]], float]:
    """Drafts behind growing texts, which are the same for all weights, and processor ms of one."""
    tokenizer = load_tokenizer(model)
    texts = [tokenizer.encode(prompt.text) for prompt in held_out_prompts(num_streams)]
    lengths = [len(text) // 2 for text in texts]
    for name, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        ids = np.array(text[:length], dtype=np.int32)
        drafter.open(DraftRequest(str(name), ids, length, 0.0, 1))
    drafts, seconds = [], []
    for number in range(ROUNDS):
        start = time.process_time()
        queries = [Query(str(name), length, MAX_NODES) for name, length in enumerate(lengths)]
        proposals = drafter.propose(queries)
        if number >= WARM:
            seconds.append(time.process_time() - start)
        drafts += [proposal.tokens.tolist() for proposal in proposals]
        for name, text in enumerate(texts):
            token = np.array([text[lengths[name] % len(text)]], dtype=np.int32)
            drafter.observe([Commit(str(name), lengths[name], token)])
            lengths[name] += 1
    return drafts, 1000 * median(seconds)


def weight_bytes(drafter: ModelDrafter) -> tuple[int, int]:
    """All weights of its model, what is shared counted once; and those of its decoder layers."""
    stage = drafter._stage  # noqa: SLF001 - measured as it is
    assert isinstance(stage, Stage), "measured are the models that draftline's own stage runs"
    part, own = stage._part, stage._own  # noqa: SLF001
    layers: list[Any] = [*part.layers]
    others: list[Any] = [part.embed, part.norm, part.head]
    if own is not None:
        # They have taken the slice's weights, in a layout of theirs.
        layers += own._tensors  # noqa: SLF001
        others += [own._norm, own._head]  # noqa: SLF001
    return _num_bytes([*layers, *others]), _num_bytes(layers)


def _num_bytes(parts: Any) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors(parts)}.values())


def _tensors(part: Any) -> Iterator[Tensor]:
    """The tensors of modules, also of those that are no modules of torch's."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, FastLinear):
        yield from _tensors([part.weight, part.bias])
    elif isinstance(part, nn.Module):
        yield from _tensors(list(vars(part).values()))
    elif isinstance(part, dict):
        yield from _tensors(list(part.values()))
    elif isinstance(part, list | tuple):
        for one in part:
            yield from _tensors(one)


def table(found: list[Row]) -> str:
    """The rows in Markdown."""
    heads = ("model", "weights", "MB", "of its layers", "ms a draft", "tokens as of plain weights")
    lines = [
        (
            f"`{row.model}`",
            row.weights if row.compile == "off" else f"{row.weights}, own operators",
            f"{row.bytes / 1e6:.2f}",
            f"{row.layer_bytes / 1e6:.2f}",
            f"{row.ms:.1f}",
            f"{row.equal:.0%}",
        )
        for row in found
    ]
    return markdown_table(heads, lines)


def main(
    *,
    models: Annotated[str, typer.Option(help="Models, with commas.")] = "demo-drafter,demo",
    streams: Annotated[int, typer.Option(help="Requests that are drafted for at once.")] = 1,
    output: Annotated[Path, typer.Option(help="JSON of the results.")] = RESULTS,
) -> None:
    """Measure, print, write."""
    quiet_libraries()
    torch.set_num_threads(1)
    found = [row for model in models.split(",") for row in rows(model, streams)]
    Console(width=120, highlight=False).print(table(found))
    content = {"machine": machine().fields(), "streams": streams, "rows": list(map(asdict, found))}
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
