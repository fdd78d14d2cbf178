"""`draftline corpus`: retrieval stores from the command line."""

# ruff: noqa: PLC0415 - the command line's help must not wait for numpy and torch

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import typer
from rich.console import Console
from rich.table import Table

from ..progress import progress

if TYPE_CHECKING:
    from ....retrieval_store.store import SegmentStore


Selection = Literal["lowest", "coverage", "token_coverage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusJob:
    """Documents to add, and how they are chosen.

    inputs                 files and folders
    model                  that the store is for, and that scores the documents
    keep, select, max_perplexity  see `Refinement`; None: no limit, its default
    min_tokens, min_compression_ratio  see `DocumentRules`
    journal                file of scores; None: beside a store that is a folder, else none
    report                 JSON file; None: none
    """

    inputs: tuple[Path, ...]
    model: str
    namespace: str
    keep: int | None
    select: Selection | None
    max_perplexity: float | None
    min_tokens: int
    min_compression_ratio: float
    journal: Path | None
    report: Path | None


corpus_app = typer.Typer(
    help="Build and look after retrieval stores.", no_args_is_help=True, rich_markup_mode=None
)
console = Console(highlight=False, soft_wrap=True)
# As `retrieval_store.search.lookup` has it, which the help must not wait for.
SHARED = "shared"

Store = Annotated[str, typer.Option("--store", help="Folder or redis:// URL of the store.")]
Model = Annotated[
    str, typer.Option("--model", help="Model whose tokenizer the store is built for.")
]
Namespace = Annotated[
    str, typer.Option("--namespace", help="Whose data: shared, or one tenant's name.")
]
Files = Annotated[
    list[Path] | None,
    typer.Argument(help="Files (.txt, .md, .py, .jsonl, .parquet) or folders of them."),
]
Input = Annotated[
    list[Path] | None, typer.Option("--input", help="The same as FILES; may be repeated.")
]
Keep = Annotated[
    int | None,
    typer.Option("--keep", min=1, help="Keep N documents, and no more."),
]
Select = Annotated[
    Selection | None,
    typer.Option(
        "--select",
        help="Which N: those of lowest perplexity, or those that together hold most n-grams, each "
        "weighted by 1 / its document's perplexity (coverage) or by the model's probability of its "
        "last token (token_coverage). Default with --keep: token_coverage.",
    ),
]
MaxPerplexity = Annotated[
    float | None,
    typer.Option("--max-perplexity", min=1, help="Keep no document of a higher perplexity."),
]
MinTokens = Annotated[
    int, typer.Option("--min-tokens", min=1, help="Drop documents of fewer tokens.")
]
MinCompressionRatio = Annotated[
    float,
    typer.Option(
        "--min-compression-ratio",
        min=0,
        max=1,
        help="Drop documents that compress to a smaller share of their size: repeats.",
    ),
]
Journal = Annotated[
    Path | None,
    typer.Option(
        "--journal",
        help="File that keeps scores: the same command goes on where it was killed. "
        "Default: beside a store that is a folder, STORE.scores.",
    ),
]
Report = Annotated[
    Path | None, typer.Option("--report", help="JSON file of what was dropped and why.")
]


def _writer(name: str, description: str, *, replaces: bool) -> None:
    """Register a command that writes documents; `replaces`: in place of what is there."""

    @corpus_app.command(name, help=description)
    def write(  # noqa: PLR0913 - one parameter a flag
        files: Files = None,
        *,
        more: Input = None,
        store: Store,
        model: Model = "demo",
        namespace: Namespace = "shared",
        keep: Keep = None,
        select: Select = None,
        max_perplexity: MaxPerplexity = None,
        min_tokens: MinTokens = 64,
        min_compression_ratio: MinCompressionRatio = 0.05,
        journal: Journal = None,
        report: Report = None,
    ) -> None:
        from .build import add_corpus

        opened = _open(store)
        old = opened.manifest().segment_ids(namespace) if replaces else []
        job = CorpusJob(
            inputs=(*(files or ()), *(more or ())), model=model, namespace=namespace,
            keep=keep, select=select, max_perplexity=max_perplexity,
            min_tokens=min_tokens, min_compression_ratio=min_compression_ratio,
            journal=journal, report=report,
        )  # fmt: skip
        add_corpus(opened, job, console, remove=old)


_writer("build", "Replace what a namespace holds by the documents of FILES.", replaces=True)
_writer("add", "Add the documents of FILES to a namespace.", replaces=False)


@corpus_app.command("list")
def list_segments(*, store: Store) -> None:
    """List the segments of a store."""
    from ....retrieval_store.store import listed_sizes

    table = Table("namespace", "segment", "bytes", box=None, pad_edge=False)
    for namespace, sizes in listed_sizes(_open(store)).items():
        for segment_id, size in sizes.items():
            table.add_row(namespace, segment_id, f"{size:,}")
    console.print(table)


@corpus_app.command()
def stats(*, store: Store) -> None:
    """Count documents, tokens and bytes of each namespace, texts that were learned and are not in
    a segment yet, and what is damaged; tell whether the namespace may be learned."""
    from .stats import COLUMNS, store_stats

    namespaces, unread = store_stats(store)
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for namespace in namespaces:
        table.add_row(*namespace.row())
    console.print(table)
    if unread is not None:
        console.print(f"what is learned cannot be read: {unread}")


@corpus_app.command()
def remove(
    segment: Annotated[str, typer.Argument(help="Segment id, or all.")],
    *,
    store: Store,
    namespace: Namespace = "shared",
) -> None:
    """Remove one segment of a namespace, or all of them."""
    from ....core.errors import StoreError

    opened = _open(store)
    known = opened.manifest().segment_ids(namespace)
    if segment != "all" and segment not in known:
        raise StoreError(f"namespace {namespace} has no segment {segment}; see corpus list")
    removed = known if segment == "all" else [segment]
    opened.change(namespace, remove=removed)
    for segment_id in removed:
        console.print(f"removed {segment_id}")


def _open(url: str) -> SegmentStore:
    from ....retrieval_store.serving.open_store import open_store

    return open_store(url)


@corpus_app.command()
def compact(*, store: Store, namespace: Namespace = "shared") -> None:
    """Make one segment of all those of a namespace, and drop copies of documents."""
    from ....retrieval_store.corpus.compaction import compact as compact_namespace
    from ....retrieval_store.serving.open_store import open_store

    opened = open_store(store, must_exist=True)
    with progress("compacting", total=1, unit="namespaces"):
        report = compact_namespace(opened, namespace)
    if not report.removed:
        console.print(f"namespace {namespace} has one segment already, {report.segment_id}")
        return
    console.print(
        f"segments {', '.join(report.removed)} are now {report.segment_id}; "
        f"copies of documents dropped: {report.num_duplicates}"
    )


@corpus_app.command()
def verify(*, store: Store) -> None:
    """Check every segment: checksums, borders of documents, order. Exits 1 if one is bad."""
    from ....core.errors import StoreError
    from ....retrieval_store.segment.check import check_segment
    from ....retrieval_store.serving.open_store import open_store

    opened = open_store(store, must_exist=True)
    num_bad = 0
    for namespace, sizes in opened.manifest().sizes.items():
        for segment_id in sizes:
            name = f"{namespace}/{segment_id}"
            try:
                check_segment(opened.get(namespace, segment_id), name)
                console.print(f"ok   {name}")
            except StoreError as error:
                num_bad += 1
                console.print(f"BAD  {name}: {error}")
    if num_bad:
        raise typer.Exit(1)


@corpus_app.command()
def export(
    output: Annotated[Path, typer.Argument(help="The .jsonl file to write.")],
    *,
    store: Store,
    namespace: Namespace = "shared",
    model: Annotated[
        str | None, typer.Option("--model", help="Model whose tokenizer adds the texts.")
    ] = None,
) -> None:
    """Write the documents of a namespace: one a line, its token ids and, with a model, its text."""
    from ....core.errors import ConfigError
    from ....retrieval_store.corpus.compaction import documents_of
    from ....retrieval_store.serving.open_store import open_store

    opened = open_store(store, must_exist=True)
    listed = opened.manifest().segment_ids(namespace)
    if not listed:
        raise ConfigError("namespace", f"{namespace} has no segments; see corpus list")
    decoder = None if model is None else _Decoder.of(model)
    count = 0
    with (
        output.open("w", encoding="utf-8") as file,
        progress("exporting", total=len(listed), unit="segments") as work,
    ):
        for segment_id in listed:
            segment = opened.get(namespace, segment_id)
            if decoder is not None:
                origin = f"{namespace}/{segment_id}"
                segment.require(origin, tokenizer_hash=decoder.tokenizer_hash)
            for document in documents_of(segment):
                row: dict[str, object] = {"tokens": document.tolist()}
                if decoder is not None:
                    row["text"] = decoder.decode(document.tolist())
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
            work.advance()
    console.print(f"wrote {count} documents to {output}")


@corpus_app.command("accept-loss")
def accept_loss(*, store: Store) -> None:
    """Give up what a store held before it lost its data: servers, which keep what they have in
    memory until then, follow what it holds now."""
    from ....retrieval_store.serving.open_store import open_store

    opened = open_store(store, must_exist=True)
    opened.accept_loss()
    count = sum(len(sizes) for sizes in opened.manifest().sizes.values())
    console.print(f"servers follow what {opened.url} holds now: {count} segments")
    console.print("what corpus learn NAMESPACE --off said may be lost, too; see corpus stats")


@dataclass(frozen=True, slots=True)
class _Decoder:
    """A tokenizer's fingerprint and its decoding function."""

    tokenizer_hash: str
    decode: Callable[[list[int]], object]

    @classmethod
    def of(cls, model: str) -> Self:
        from ....models.text.fingerprint import tokenizer_hash
        from ...ray_serve.runtime import quiet_libraries
        from .build import open_corpus_model

        quiet_libraries()
        opened = open_corpus_model(model)
        return cls(tokenizer_hash(opened.plan.info.path), opened.tokenizer.decode)


@corpus_app.command()
def learn(
    namespace: Annotated[str, typer.Argument(help="Whose texts: one tenant's name.")],
    *,
    store: Store,
    on: Annotated[
        bool,
        typer.Option(
            "--on/--off",
            help="--off: no server learns of it from now on, whatever its settings; what was "
            "learned stays until corpus forget. --on: servers with learn: true may.",
            show_default=False,
        ),
    ],
) -> None:
    """Say in the store itself whether a namespace may be learned. It may until it is forbidden."""
    from ....retrieval_store.serving.open_store import open_policy

    with closing(open_policy(store, writes=True)) as policy:
        policy.switch(namespace, learns=on)
    console.print(f"learning of {namespace} is {'allowed' if on else 'off'} in this store")


@corpus_app.command()
def forget(
    namespace: Annotated[str, typer.Argument(help="Whose data: one tenant's name, or shared.")],
    *,
    store: Store,
    keep_learning: Annotated[
        bool,
        typer.Option(
            "--keep-learning",
            help="Do not switch learning off; requests that end later are learned again.",
        ),
    ] = False,
) -> None:
    """Switch learning of a namespace off, delete all of it, and verify that nothing is left."""
    from ....retrieval_store.learning import forget_namespace
    from ....retrieval_store.serving.open_store import open_eraser, open_policy

    switches = not keep_learning and namespace != SHARED
    with closing(open_eraser(store)) as eraser, closing(open_policy(store, writes=True)) as policy:
        count = forget_namespace(eraser, namespace, policy if switches else None)
        is_off = namespace in policy.off()
    console.print(f"forgot {namespace}: {count} entries deleted, nothing is left")
    if is_off:
        console.print(f"learning stays off; draftline corpus learn {namespace} --on allows it")
