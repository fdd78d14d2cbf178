"""`draftline corpus`: retrieval stores from the command line."""

# ruff: noqa: PLC0415 - the command line's help must not wait for numpy and torch

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ..retrieval_store.store import SegmentStore

corpus_app = typer.Typer(
    help="Build and look after retrieval stores.", no_args_is_help=True, rich_markup_mode=None
)
console = Console(highlight=False, soft_wrap=True)

Store = Annotated[str, typer.Option("--store", help="Folder or redis:// URL of the store.")]
Model = Annotated[
    str, typer.Option("--model", help="Model whose tokenizer the store is built for.")
]
Namespace = Annotated[
    str, typer.Option("--namespace", help="Whose data: shared, or one tenant's name.")
]
Files = Annotated[
    list[Path], typer.Argument(help="Files (.txt, .md, .py, .jsonl) or folders of them.")
]


Keep = Annotated[
    int | None,
    typer.Option("--keep", min=1, help="Keep the documents of the N lowest perplexities."),
]
MaxPerplexity = Annotated[
    float | None,
    typer.Option("--max-perplexity", min=1, help="Keep no document of a higher perplexity."),
]


@dataclass(frozen=True, slots=True)
class _Job:
    """What is added: files, the model that judges them, and its limits."""

    files: list[Path]
    model: str
    keep: int | None
    max_perplexity: float | None


@corpus_app.command()
def build(
    files: Files,
    *,
    store: Store,
    model: Model = "demo",
    namespace: Namespace = "shared",
    keep: Keep = None,
    max_perplexity: MaxPerplexity = None,
) -> None:
    """Replace what a namespace holds by the documents of FILES."""
    opened = _open(store)
    old = opened.manifest().segment_ids(namespace)
    _add(opened, _Job(files, model, keep, max_perplexity), namespace, old)


@corpus_app.command()
def add(
    files: Files,
    *,
    store: Store,
    model: Model = "demo",
    namespace: Namespace = "shared",
    keep: Keep = None,
    max_perplexity: MaxPerplexity = None,
) -> None:
    """Add the documents of FILES to a namespace."""
    _add(_open(store), _Job(files, model, keep, max_perplexity), namespace)


@corpus_app.command("list")
def list_segments(*, store: Store) -> None:
    """List the segments of a store."""
    table = Table("namespace", "segment", "bytes", box=None, pad_edge=False)
    for namespace, sizes in _open(store).manifest().sizes.items():
        for segment_id, size in sizes.items():
            table.add_row(namespace, segment_id, f"{size:,}")
    console.print(table)


@corpus_app.command()
def stats(*, store: Store) -> None:
    """Count documents, tokens and bytes of each namespace."""
    opened = _open(store)
    table = Table("namespace", "segments", "documents", "tokens", "bytes", box=None, pad_edge=False)
    for namespace, sizes in opened.manifest().sizes.items():
        headers = [opened.get(namespace, segment_id).header for segment_id in sizes]
        table.add_row(
            namespace,
            str(len(sizes)),
            f"{sum(header.num_documents for header in headers):,}",
            f"{sum(header.num_tokens for header in headers):,}",
            f"{sum(sizes.values()):,}",
        )
    console.print(table)


@corpus_app.command()
def remove(
    segment: Annotated[str, typer.Argument(help="Segment id, or all.")],
    *,
    store: Store,
    namespace: Namespace = "shared",
) -> None:
    """Remove one segment of a namespace, or all of them."""
    from ..core.errors import StoreError

    opened = _open(store)
    known = opened.manifest().segment_ids(namespace)
    if segment != "all" and segment not in known:
        raise StoreError(f"namespace {namespace} has no segment {segment}; see corpus list")
    removed = known if segment == "all" else [segment]
    opened.change(namespace, remove=removed)
    for segment_id in removed:
        console.print(f"removed {segment_id}")


@corpus_app.command()
def forget(
    namespace: Annotated[str, typer.Argument(help="Whose data: one tenant's name, or shared.")],
    *,
    store: Store,
) -> None:
    """Delete all of a namespace, learned texts too, and verify that nothing is left."""
    from ..retrieval_store.erasure import forget_namespace
    from ..retrieval_store.open_store import open_eraser

    eraser = open_eraser(store)
    count = forget_namespace(eraser, namespace)
    eraser.close()
    console.print(f"forgot {namespace}: {count} entries deleted, nothing is left")


def _open(url: str) -> SegmentStore:
    from ..retrieval_store.open_store import open_store

    return open_store(url)


def _add(store: SegmentStore, job: _Job, namespace: str, remove: Sequence[str] = ()) -> None:
    from ..retrieval_store.build import build_corpus
    from ..retrieval_store.documents import read_documents
    from .corpus_model import open_corpus_model
    from .ray_runtime import quiet_libraries

    quiet_libraries()
    model = open_corpus_model(job.model)
    settings = model.settings(
        keep=job.keep, max_perplexity=job.max_perplexity, show_progress=console.is_terminal
    )
    documents = read_documents(job.files)
    report = build_corpus(store, namespace, documents, model.tokenize, settings, remove=remove)
    dropped = ", ".join(f"{reason} {count}" for reason, count in report.dropped.items())
    console.print(
        f"kept {report.num_kept} of {report.num_read} documents, {report.num_tokens:,} tokens, "
        f"{report.num_bytes:,} bytes" + (f"; dropped: {dropped}" if dropped else "")
    )
