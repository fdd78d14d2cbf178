"""`draftline corpus build` and `add`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from ....core.errors import ConfigError
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


def add_corpus(
    store: SegmentStore, job: CorpusJob, console: Console, *, remove: Sequence[str] = ()
) -> None:
    """Add a job's documents to a store and `remove` segments at once. Raises `DraftlineError`."""
    if not job.inputs:
        raise ConfigError("input", "name files or folders: draftline corpus build FILES --store S")
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
    with model.settings(limits, progress=progress) as settings:
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
