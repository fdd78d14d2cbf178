"""`draftline corpus build` and `add`: build, print, write, and draw the perplexities."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.table import Table

from ....core.errors import ConfigError
from ....measure.report.plots import DPI, require_matplotlib
from ....retrieval_store.corpus.build import build_corpus
from ....retrieval_store.corpus.document_files import read_documents
from ....retrieval_store.corpus.document_filter import DocumentRules
from ....retrieval_store.corpus.report import CorpusReport
from ....retrieval_store.corpus.selection import resolve_selection
from ....retrieval_store.store import SegmentStore
from ...ray_serve.runtime import quiet_libraries
from ..progress import progress
from .command import CorpusJob
from .model import DocumentLimits, open_corpus_model

BINS = 60


def write_histogram(report: CorpusReport, path: Path) -> None:
    """PNG: documents by perplexity, those that were kept in front of all that were scored.

    Needs matplotlib, and a report of which something was scored.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - plots are optional

    scored = _finite(report.scored)
    kept = _finite(report.kept_scored)
    low, high = min(scored), max(scored)
    edges = np.geomspace(low, max(high, low * 1.01), BINS + 1).tolist()
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.hist(scored, bins=edges, color="lightgrey", label=f"scored: {len(scored):,}")
    axes.hist(kept, bins=edges, color="tab:blue", label=f"kept: {len(kept):,}")
    axes.axvline(float(np.median(scored)), color="dimgrey", linestyle=":", linewidth=1)
    axes.annotate(
        f"median {np.median(scored):.2f}", (float(np.median(scored)), 1),
        xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points",
        color="dimgrey",
    )  # fmt: skip
    axes.set_xscale("log")
    _plain_ticks(axes)
    axes.set_xlabel("perplexity of the document under the target")
    axes.set_ylabel("documents")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def _plain_ticks(axes: object) -> None:
    from matplotlib.axes import Axes  # noqa: PLC0415
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415

    assert isinstance(axes, Axes)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _finite(values: tuple[float, ...]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def add_corpus(
    store: SegmentStore, job: CorpusJob, console: Console, *, remove: Sequence[str] = ()
) -> None:
    """Add a job's documents to a store and `remove` segments at once. Raises `DraftlineError`."""
    if not job.inputs:
        raise ConfigError("input", "name files or folders: draftline corpus build FILES --store S")
    if job.histogram is not None:
        require_matplotlib("histogram")
    # Before the model is loaded.
    resolve_selection(job.select, job.keep)
    quiet_libraries()
    model = open_corpus_model(job.model)
    documents = model.render(read_documents(job.inputs))
    limits = DocumentLimits(
        rules=DocumentRules(
            min_tokens=job.min_tokens, min_compression_ratio=job.min_compression_ratio
        ),
        keep=job.keep,
        select=job.select,
        max_perplexity=job.max_perplexity,
        journal=job.journal or _journal_beside(store),
    )
    scores = job.histogram is not None
    with model.settings(limits, scores=scores, progress=progress) as settings:
        report = build_corpus(
            store, job.namespace, documents, model.tokenize, settings, remove=remove
        )
    _print_report(report, console)
    _write(report, job, console)


def _journal_beside(store: SegmentStore) -> Path | None:
    """None for a store that is no folder."""
    if urlsplit(store.url).scheme:
        return None
    folder = Path(store.url)
    return folder.with_name(f"{folder.name}.scores")


def _print_report(report: CorpusReport, console: Console) -> None:
    if report.dropped:
        table = Table("dropped", "documents", "share", "such as", box=None, pad_edge=False)
        for reason, count in report.dropped.items():
            share = f"{count / report.num_read:.1%}"
            table.add_row(reason, f"{count:,}", share, report.examples[reason][0])
        console.print(table)
    for name, perplexities in (
        ("perplexities", report.perplexities),
        ("kept", report.kept_perplexities),
    ):
        if perplexities:
            quartiles = ", ".join(f"{value:.2f}" for value in perplexities.values())
            console.print(f"{name} (least, quartiles, most): {quartiles}")
    console.print(
        f"kept {report.num_kept} of {report.num_read} documents, {report.num_tokens:,} tokens, "
        f"{report.num_bytes:,} bytes"
    )


def _write(report: CorpusReport, job: CorpusJob, console: Console) -> None:
    if job.report is not None:
        job.report.parent.mkdir(parents=True, exist_ok=True)
        job.report.write_text(json.dumps(report.fields(), indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {job.report}")
    if job.histogram is not None:
        write_histogram(report, job.histogram)
        console.print(f"wrote {job.histogram}")
