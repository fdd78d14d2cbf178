"""How often a head's draft is not the target's token, by the number of passes behind it.

    python -m draftline.benchmarks.heads.misalignment [--heads NAME=FOLDER,...]

GRIFFIN's figure 1c (arXiv 2502.11018): in pass 1 a head reads the target's features, in pass n its
own last n - 1, behind the text's own tokens. A draft is misaligned where its most probable token is
not the target's most probable one, and likewise where it is not the token of the text. Texts are
what the target says behind the bundled prompts, which no head was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from ...cluster.config import EngineConfig
from ...core.errors import ConfigError
from ...core.request.sampling_params import SamplingParams
from ...deploy.cli.bench.head_rows import read_heads
from ...deploy.cli.demo.held_out_prompts import held_out_prompts
from ...deploy.engine.engine import Engine
from ...measure.records.record import machine
from ...measure.report.plots import require_matplotlib
from ...models.heads.feature_head import FeatureHead
from ...models.heads.load_head import load_head
from ...models.load.checkpoint import resolve_head_path, resolve_model_path
from ...models.load.model_info import read_model_info
from ...training.heads.distilled_texts import DistilledText
from ...training.heads.feature_passes.alignment import pass_mask
from ...training.heads.feature_passes.draft_vocabulary import best_tokens, draft_logits
from ...training.heads.feature_passes.passes import drafting_passes, text_rows
from ...training.heads.target import Target, TextBatch

RESULTS = Path(__file__).parents[1] / "results" / "misalignment.json"
TEXTS_AT_ONCE = 8
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DPI = 140


@dataclass(slots=True)
class PassCount:
    """Of one pass: drafts, and those that differ.

    from_target  from the target's most probable token
    from_text    from the text's token
    """

    drafts: int = 0
    from_target: int = 0
    from_text: int = 0


@torch.no_grad()
def count_misaligned(
    head: FeatureHead, target: Target, batch: TextBatch, counts: Sequence[PassCount]
) -> None:
    """Add a batch to the counts of the first passes."""
    rows = text_rows(target.embed, batch)
    wanted = target.lm_head(rows.states).argmax(-1)
    every_row = torch.ones_like(rows.answers)
    for index, said in enumerate(drafting_passes(head, rows, len(counts))):
        # The first rows of a text have fewer features before them than the pass needs.
        mask = pass_mask([every_row] * index, rows.answers)
        best = best_tokens(head, draft_logits(head, target.lm_head, said.predict))
        counts[index].drafts += int(mask.sum())
        counts[index].from_target += int(((best != wanted) & mask).sum())
        counts[index].from_text += int(((best != rows.tokens) & mask).sum())


def measured(
    folder: Path, model: Path, texts: Sequence[DistilledText], num_passes: int
) -> list[PassCount]:
    """Of one head. Raises `ConfigError` if it is no feature head."""
    head = load_head(folder)
    if not isinstance(head, FeatureHead):
        raise ConfigError("heads", f"{folder} is no feature head; it goes on from no features")
    layers = head.config.layers_of(read_model_info(model).num_layers)
    target = Target(model, torch.device("cpu"), layers)
    counts = [PassCount() for _ in range(num_passes)]
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        own = texts[first : first + TEXTS_AT_ONCE]
        batch = target.batch(own, max(len(text.tokens) for text in own))
        count_misaligned(head, target, batch, counts)
    return counts


def said_texts(
    model: str, count: int | None, max_tokens: int, temperature: float
) -> list[DistilledText]:
    """What the target says behind the bundled prompts."""
    prompts = [prompt.text for prompt in held_out_prompts(count)]
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    with Engine(EngineConfig(model=model)) as engine:
        answers = engine.generate(prompts, params)
    return [
        DistilledText((*answer.prompt_token_ids, *answer.token_ids), len(answer.prompt_token_ids))
        for answer in answers
    ]


def table(found: dict[str, list[PassCount]], *, is_text: bool) -> Table:
    """A row a head, a column a pass."""
    title = "the text's token" if is_text else "the target's most probable token"
    shown = Table(title=f"drafts that are not {title}, %")
    shown.add_column("head")
    for index in range(len(next(iter(found.values())))):
        shown.add_column(str(index + 1), justify="right")
    for name, counts in found.items():
        shown.add_row(name, *(f"{100 * _share(count, is_text=is_text):.1f}" for count in counts))
    return shown


def draw(found: dict[str, list[PassCount]], png: Path, title: str) -> None:
    """Both shares by pass."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - plots are optional

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = ("not the target's most probable token", "not the text's token")
    for axes, is_text, name in zip(panels, (False, True), names, strict=True):
        for index, (head, counts) in enumerate(found.items()):
            passes = range(1, len(counts) + 1)
            shares = [100 * _share(count, is_text=is_text) for count in counts]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(passes, shares, marker="o", markersize=4, color=colour, label=head)
        axes.set(title=name, xlabel="pass")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="misaligned drafts, %")
    panels[0].set_ylim(bottom=0)
    panels[0].legend()
    figure.suptitle(title)
    figure.savefig(png, dpi=DPI)


def _share(count: PassCount, *, is_text: bool) -> float:
    return (count.from_text if is_text else count.from_target) / max(count.drafts, 1)


def main(  # noqa: PLR0913 - one parameter a flag
    *,
    heads: Annotated[str, typer.Option(help="NAME=FOLDER,...")] = "demo-griffin=demo-griffin",
    model: Annotated[str, typer.Option(help="Their target.")] = "demo",
    num_passes: Annotated[int, typer.Option(min=1, help="Passes.")] = 7,
    num_prompts: Annotated[
        int | None, typer.Option(help="Bundled prompts; all by default.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of a text.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of the texts; heads of the demo model learned from 0.7.")
    ] = 0.7,
    output: Annotated[Path, typer.Option(help="JSON of the results; .png beside it.")] = RESULTS,
) -> None:
    """Count, print, write."""
    require_matplotlib("output")
    torch.set_num_threads(1)
    console = Console(highlight=False, soft_wrap=True)
    texts = said_texts(model, num_prompts, max_tokens, temperature)
    folder = resolve_model_path(model)
    found = {
        name: measured(resolve_head_path(head), folder, texts, num_passes)
        for name, head in read_heads(heads).items()
    }
    content = {
        "machine": machine().fields(), "model": model, "texts": len(texts),
        "max_tokens": max_tokens, "temperature": temperature,
        "heads": {name: [asdict(count) for count in counts] for name, counts in found.items()},
    }  # fmt: skip
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draw(found, output.with_suffix(".png"), f"{model}, {len(texts)} texts at T = {temperature:g}")
    for is_text in (False, True):
        console.print(table(found, is_text=is_text))
    console.print(machine().line())


if __name__ == "__main__":
    typer.run(main)
