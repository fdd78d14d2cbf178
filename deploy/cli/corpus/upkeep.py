"""Upkeep of stores: `draftline corpus compact|verify|export|accept-loss|learn|forget`."""

# ruff: noqa: PLC0415 - the command line's help must not wait for numpy and torch

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import typer
from rich.console import Console

from ..progress import progress
from .command import SHARED, Namespace, Store

upkeep_app = typer.Typer()
console = Console(highlight=False, soft_wrap=True)


@upkeep_app.command()
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


@upkeep_app.command()
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


@upkeep_app.command()
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


@upkeep_app.command("accept-loss")
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


@upkeep_app.command()
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


@upkeep_app.command()
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
