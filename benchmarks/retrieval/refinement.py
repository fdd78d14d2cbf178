"""What is refinement worth? Stores of low, high, random perplexity, of equal numbers of tokens.

    python -m draftline.benchmarks.retrieval.refinement [--model smollm2 --prompts FILE]

The corpus are installed packages, which the bundled target was not trained on. The target's answers
to held-out prompts are recorded and replayed with every store, alone and behind CORE. What each
`--select` of `draftline corpus build` takes stands beside random draws of as many tokens (of a
document what fits into the target's context); differences have 95 % intervals from bootstrap draws
over prompts and over the random stores. Text of the target's own is the positive control: were that
worth nothing either, the experiment would show nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ...core.arrays import Float64
from ...deploy.cli.bench.job import BenchJob
from ...deploy.cli.corpus.build import CorpusModel, open_corpus_model
from ...deploy.ray_serve.runtime import quiet_libraries
from ...measure.records import machine
from ...measure.replay.recording import read_recording
from ...measure.report.summary import Interval, drawn_taus, interval
from ...retrieval_store.corpus.documents import TokenizedDocument
from ...retrieval_store.corpus.refine import Score
from .refinement_stores import (
    DocumentChoice,
    choices,
    contexts_of,
    corpus,
    counts_of_stores,
    lookup_us,
    own_texts,
    record,
    scored,
    write_store,
)

MODES = {"alone": "", "with_core": "+core"}


def rows_of(
    stores: Sequence[DocumentChoice],
    counts: Mapping[str, Float64],
    sizes: Mapping[str, int],
    perplexities: Mapping[str, float],
    lookups: Mapping[str, float],
) -> list[dict[str, Any]]:
    """A row for each store but the random ones, which share one for each budget.

    counts  float64 [prompts, 2] of each store's name, and of it with CORE
    """
    rows = [_core_row(counts)]
    for budget in sorted({store.budget for store in stores}, reverse=True):
        own = [store for store in stores if store.budget == budget]
        drawn = [store.name for store in own if store.kind == "random"]
        for store in own:
            if store.kind == "random" and store.draw:
                continue
            row: dict[str, Any] = {
                "kind": store.kind,
                "tokens": sizes[store.name],
                "median_perplexity": perplexities.get(store.name),
                "lookup_us": lookups.get(store.name),
            }
            for mode, suffix in MODES.items():
                if store.kind == "random":
                    row[mode] = asdict(_mean(drawn, suffix, counts))
                    taus = [_tau(counts[f"{name}{suffix}"]) for name in drawn]
                    row[f"{mode}_least_most"] = [min(taus), max(taus)]
                    continue
                row[mode] = asdict(_of(store.name, suffix, counts))
                if drawn:
                    row[f"{mode}_beyond_random"] = asdict(
                        _beyond(store.name, drawn, suffix, counts)
                    )
            rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]], temperature: float, console: Console) -> None:
    """Print the rows."""
    table = Table(
        "store", "tokens", "perplexity", "lookup, us", "tau", "beyond random", "with CORE",
        "beyond random", box=None, title=f"temperature {temperature:g}", title_justify="left",
    )  # fmt: skip
    for row in rows:
        cells = [row["kind"], f"{row['tokens']:,}" if row["tokens"] else ""]
        for key in ("median_perplexity", "lookup_us"):
            cells.append("" if row.get(key) is None else f"{row[key]:.1f}")
        for mode in MODES:
            for key, sign in ((mode, ""), (f"{mode}_beyond_random", "+")):
                cells.append(_shown(row.get(key), sign))
        table.add_row(*cells)
    console.print(table)


def _shown(one: Mapping[str, float] | None, sign: str) -> str:
    if one is None:
        return ""
    ends = f"({one['low']:{sign}.3f} - {one['high']:{sign}.3f})"
    return f"{one['value']:{sign}.3f} {ends}"


def _core_row(counts: Mapping[str, Float64]) -> dict[str, Any]:
    return {"kind": "CORE alone", "tokens": 0, "with_core": asdict(_of("core", "", counts))}


def _tau(counts: Float64) -> float:
    tokens, steps = counts.sum(axis=0)
    return float(tokens / steps)


def _of(name: str, suffix: str, counts: Mapping[str, Float64]) -> Interval:
    whole, drawn = drawn_taus(counts[f"{name}{suffix}"][None])
    return interval(whole[0], drawn[:, 0])


def _mean(names: Sequence[str], suffix: str, counts: Mapping[str, Float64]) -> Interval:
    """The mean of several stores, in draws of prompts and of stores."""
    whole, drawn = drawn_taus(np.stack([counts[f"{name}{suffix}"] for name in names]))
    return interval(whole.mean(), _resampled(drawn))


def _beyond(
    name: str, others: Sequence[str], suffix: str, counts: Mapping[str, Float64]
) -> Interval:
    """How much more tau a store has than the mean of others, on the same draws of prompts."""
    totals = np.stack([counts[f"{one}{suffix}"] for one in (name, *others)])
    whole, drawn = drawn_taus(totals)
    return interval(whole[0] - whole[1:].mean(), drawn[:, 0] - _resampled(drawn[:, 1:]))


def _resampled(drawn: Float64) -> Float64:
    """float64 [draws]: the mean over stores that were drawn with replacement, too."""
    rng = np.random.default_rng(1)
    count = drawn.shape[1]
    weights = rng.multinomial(count, np.full(count, 1 / count), len(drawn)) / count
    return (drawn * weights).sum(axis=1)


RESULTS = Path(__file__).parents[1] / "results" / "refinement.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What was asked for; shares are of the corpus's tokens."""

    model: str
    tokens: int
    far_share: float
    drops_compressible: bool
    shares: tuple[float, ...]
    draws: int
    num_prompts: int
    max_tokens: int
    temperatures: tuple[float, ...]
    prompts: str


def main(  # noqa: PLR0913 - one parameter a flag
    *,
    model: Annotated[str, typer.Option(help="Target: a folder, `demo` or `smollm2`.")] = "demo",
    tokens: Annotated[int, typer.Option(help="Of the whole corpus.")] = 1_500_000,
    far_share: Annotated[
        float, typer.Option(help="Share of C, HTML, prose and lists; the rest is Python.")
    ] = 0.5,
    keep_compressible: Annotated[
        bool, typer.Option(help="Documents that are one line over and over stay.")
    ] = False,
    shares: Annotated[str, typer.Option(help="Of the corpus's tokens.")] = "0.05,0.2",
    draws: Annotated[int, typer.Option(help="Random stores of each share.")] = 20,
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts; default: the bundled ones.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Prompts.")] = 66,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    temperatures: Annotated[str, typer.Option(help="Of the answers.")] = "0,1",
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = RESULTS,
) -> None:
    """Score, build the stores, record, replay, print, write."""
    quiet_libraries()
    console = Console(width=110, highlight=False)
    experiment = Experiment(
        model=model,
        tokens=tokens,
        far_share=far_share,
        drops_compressible=not keep_compressible,
        shares=tuple(map(float, shares.split(","))),
        draws=draws,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        temperatures=tuple(map(float, temperatures.split(","))),
        prompts="bundled" if prompts is None else prompts.name,
    )
    target = open_corpus_model(model)
    documents = corpus(target, tokens, far_share, drops_compressible=not keep_compressible)
    texts, scores = scored(target, documents)
    found = list(choices(texts, scores, experiment.shares, draws))
    content: dict[str, Any] = {"machine": machine().fields(), **asdict(experiment), "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        for temperature in experiment.temperatures:
            job = BenchJob(
                prompts=prompts, num_prompts=num_prompts, max_tokens=max_tokens,
                temperature=temperature, rounds=1, warm_up=False, concurrency=8, model=model,
            )  # fmt: skip
            place = Path(folder) / f"t{temperature:g}"
            rows = _measured(job, place, target, (texts, scores, found), console)
            content["runs"].append({"temperature": temperature, "stores": rows})
            output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            show(rows, temperature, console)
    console.print(machine().line())


def _measured(
    job: BenchJob,
    folder: Path,
    target: CorpusModel,
    chosen: tuple[Sequence[TokenizedDocument], Sequence[Score], Sequence[DocumentChoice]],
    console: Console,
) -> list[dict[str, Any]]:
    documents, scores, found = chosen
    answers = folder / "answers.jsonl"
    record(job, answers, console)
    texts = [answer.text_ids for answer in read_recording(answers).answers]
    budget = min(choice.budget for choice in found)
    own = DocumentChoice("own", budget, 0, ())
    said = own_texts([one.ids for one in documents], budget, job)
    segments = {
        choice.name: write_store(
            folder / choice.name, [documents[i].ids for i in choice.indices], target
        )
        for choice in found
    }
    segments[own.name] = write_store(folder / own.name, said, target)
    contexts = contexts_of(texts)
    lookups = {
        name: lookup_us(segment, contexts)
        for name, segment in segments.items()
        if not name.startswith("random") or name.endswith("-0")
    }
    replay = BenchJob(replay=answers, rounds=1, warm_up=False, concurrency=8, model=job.model)
    counts = counts_of_stores(replay, {name: folder / name for name in segments}, console)
    perplexities = {
        choice.name: float(np.median([scores[i].perplexity for i in choice.indices]))
        for choice in found
    }
    sizes = {name: segment.header.num_tokens for name, segment in segments.items()}
    return rows_of([*found, own], counts, sizes, perplexities, lookups)


if __name__ == "__main__":
    typer.run(main)
