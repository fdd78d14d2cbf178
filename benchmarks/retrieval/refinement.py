"""Is refinement worth it? Tau of stores of low, random and high perplexity, by their size.

    python -m draftline.benchmarks.retrieval.refinement

Documents of the sources that the demo model was trained on, scored by it; held-out prompts. The
target's answers are recorded once and replayed under every store.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ...cluster.config import DrafterConfig
from ...deploy.cli.bench.job import BenchJob
from ...deploy.cli.bench.run import measure
from ...deploy.cli.bench.suite import ENGINE_SETTINGS
from ...deploy.cli.bench.suite_rows import GUESS_LEN, TREE_NODES, WINDOW
from ...deploy.cli.corpus.model import CorpusModel, Limits, open_corpus_model
from ...deploy.cli.demo.build_store import NAMESPACE, demo_documents
from ...deploy.ray_serve.runtime import quiet_libraries
from ...measure.clients.setting import TARGET_ONLY, Setting
from ...measure.records.record import machine
from ...retrieval_store.corpus.build import BuildProgress
from ...retrieval_store.corpus.document_filter import DocumentFilter
from ...retrieval_store.corpus.documents import TokenizedDocument
from ...retrieval_store.corpus.scoring import ScoreJournal
from ...retrieval_store.directory_store.store import DirectoryStore
from ...retrieval_store.segment.segment import build_segment
from .refinement_plot import write_plot

RESULTS = Path(__file__).parents[1] / "results" / "refinement.json"
SHARES = (0.03, 0.1, 0.3)
# A random tenth is one of many: so many are drawn.
RANDOM_DRAWS = 2
CORE = DrafterConfig(
    kind="spectra", name="core", max_nodes=TREE_NODES, window=WINDOW, guess_len=GUESS_LEN
)


@dataclass(frozen=True, slots=True)
class Choice:
    """Documents of one store; `indices` into those that were scored."""

    kind: str
    share: float
    draw: int
    indices: tuple[int, ...]

    @property
    def name(self) -> str:
        """Unique, and safe as a folder."""
        return f"{self.kind}-{self.share:g}-{self.draw}"


def choices(perplexities: Sequence[float]) -> Iterator[Choice]:
    """The whole corpus; of each share the lowest perplexities, the highest, and random draws."""
    order = sorted(range(len(perplexities)), key=lambda index: perplexities[index])
    yield Choice("whole", 1.0, 0, tuple(order))
    for share in SHARES:
        count = max(1, round(share * len(order)))
        yield Choice("lowest", share, 0, tuple(order[:count]))
        yield Choice("highest", share, 0, tuple(order[-count:]))
        for draw in range(RANDOM_DRAWS):
            chosen = random.Random(draw).sample(order, count)
            yield Choice("random", share, draw, tuple(chosen))


def _documents(model: CorpusModel, every: int) -> list[TokenizedDocument]:
    """One document in `every` of those that are fit to be stored."""
    sieve = DocumentFilter()
    sound = [one for one in demo_documents() if sieve.text_fault(one.text) is None]
    tokens = map(model.tokenize, sound)
    return [one for one in tokens if sieve.length_fault(len(one.ids)) is None][::every]


def _perplexities(
    model: CorpusModel, documents: Sequence[TokenizedDocument], journal: Path, shown: bool
) -> list[float]:
    with ScoreJournal(journal) as kept, BuildProgress(shown=shown) as progress:
        task = progress.start_work("Scoring", "tokens", sum(len(one.ids) for one in documents))
        scores = model.scorer(kept).scores(documents, lambda count: progress.advance(task, count))
    return [score.perplexity for score in scores]


def _write_store(
    folder: Path, choice: Choice, documents: Sequence[TokenizedDocument], model: CorpusModel
) -> None:
    with model.settings(Limits()) as settings:
        fingerprint = settings.fingerprint
    segment = build_segment(
        [documents[index].ids for index in sorted(choice.indices)],
        tokenizer_hash=fingerprint.tokenizer_hash,
        model_hash=fingerprint.model_hash,
        vocab_size=fingerprint.vocab_size,
    )
    DirectoryStore(folder / choice.name).put(NAMESPACE, segment)


def _taus(
    job: BenchJob, settings: Sequence[Setting], drafters: Sequence[DrafterConfig], console: Console
) -> dict[str, float]:
    """Tau of each setting by name."""
    job = replace(job, rows=(Setting(TARGET_ONLY, ()), *settings))
    engine = ENGINE_SETTINGS | {"model": "demo", "drafters": tuple(drafters)}
    result = asyncio.run(measure(job, engine, console))
    assert not result.faults
    return {
        one.name: one.whole.counts.tau for one in result.summaries if one.whole.counts is not None
    }


def _measured(
    job: BenchJob, found: Sequence[Choice], folder: Path, console: Console
) -> dict[str, float]:
    """Tau of every store, named after it; with CORE before it, `+core`; and of CORE alone."""
    stores = [
        DrafterConfig(
            kind="retrieval", name=one.name, max_nodes=TREE_NODES, store=str(folder / one.name)
        )
        for one in found
    ]
    core = Setting("core", ("core",))
    recording = folder / "answers.jsonl"
    heard = [core, Setting("heard", ("core", stores[0].source))]
    _taus(replace(job, record=recording), heard, [CORE, stores[0]], console)
    settings = [core]
    for one in stores:
        settings.append(Setting(one.source, (one.source,)))
        settings.append(Setting(f"{one.source}+core", ("core", one.source)))
    return _taus(replace(job, replay=recording), settings, [CORE, *stores], console)


def _row(
    choice: Choice,
    documents: Sequence[TokenizedDocument],
    perplexities: Sequence[float],
    taus: dict[str, float],
) -> dict[str, Any]:
    return {
        "kind": choice.kind,
        "share": choice.share,
        "draw": choice.draw,
        "documents": len(choice.indices),
        "tokens": sum(len(documents[index].ids) for index in choice.indices),
        "median_perplexity": float(np.median([perplexities[i] for i in choice.indices])),
        "tau_retrieval": taus[choice.name],
        "tau_core_and_retrieval": taus[f"{choice.name}+core"],
    }


def main(
    *,
    every: Annotated[int, typer.Option(help="One document in so many is the corpus.")] = 4,
    num_prompts: Annotated[int, typer.Option(help="Bundled prompts.")] = 20,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    journal: Annotated[
        Path, typer.Option(help="File that keeps perplexities for another run.")
    ] = Path("refinement.scores"),
    output: Annotated[Path, typer.Option(help="Where the JSON goes; beside it a PNG.")] = RESULTS,
) -> None:
    """Score, build the stores, record, replay, print, write."""
    quiet_libraries()
    console = Console(width=100, highlight=False)
    model = open_corpus_model("demo")
    documents = _documents(model, every)
    perplexities = _perplexities(model, documents, journal, console.is_terminal)
    found = list(choices(perplexities))
    job = BenchJob(num_prompts=num_prompts, max_tokens=max_tokens, rounds=1)
    with tempfile.TemporaryDirectory() as folder:
        for choice in found:
            _write_store(Path(folder), choice, documents, model)
        taus = _measured(job, found, Path(folder), console)
    rows = [_row(one, documents, perplexities, taus) for one in found]
    content = {
        "machine": machine().fields(),
        "num_prompts": num_prompts,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "every": every,
        "tau_core": taus["core"],
        "stores": rows,
    }
    _print(rows, taus["core"], console)
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write_plot(rows, taus["core"], output.with_suffix(".png"))


def _print(rows: Sequence[dict[str, Any]], core: float, console: Console) -> None:
    table = Table("documents", "", "tokens", "perplexity", "tau", "with CORE", box=None)
    for row in rows:
        table.add_row(
            f"{row['kind']} {row['share']:.0%}",
            f"{row['documents']:,}",
            f"{row['tokens']:,}",
            f"{row['median_perplexity']:.2f}",
            f"{row['tau_retrieval']:.3f}",
            f"{row['tau_core_and_retrieval']:.3f}",
        )
    console.print(table)
    console.print(f"CORE alone: {core:.3f}")
    console.print(machine().line())


if __name__ == "__main__":
    typer.run(main)
