"""Makes the bundled retrieval store: `python -m draftline.deploy.cli.demo.build_store`.

Sources that the demo models were trained on, cut into documents, scored by the demo target; those
of the lowest perplexity stay (SPECTRA-RETRIEVAL). Held-out files are left out, as in training.
With `--unrefined FOLDER`, a store of as many documents of any perplexity, to compare with.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ....models.load.bundled import DEMO_STORE
from ....retrieval_store.corpus.build import build_corpus
from ....retrieval_store.corpus.documents import Document
from ....retrieval_store.corpus.selection import LOWEST
from ....retrieval_store.directory_store.store import DirectoryStore
from ....training.corpus import SourceFile, training_files
from ..corpus.build import DocumentLimits, open_corpus_model
from ..progress import progress

NAMESPACE = "shared"
# Files are cut at empty lines into documents of about this many characters: a function or two.
DOCUMENT_CHARS = 1500


def main(
    every: Annotated[int, typer.Option(help="Score one document in so many.")] = 3,
    keep: Annotated[int, typer.Option(help="Documents that stay.")] = 1000,
    unrefined: Annotated[
        Path | None, typer.Option(help="Write a store of documents of any perplexity here.")
    ] = None,
) -> None:
    """Score, keep the lowest perplexities, write the store in place of the old one."""
    documents = demo_documents()[::every]
    folder, limit = DEMO_STORE, keep
    if unrefined is not None:
        folder, limit = unrefined, None
        documents = [documents[index * len(documents) // keep] for index in range(keep)]
    model = open_corpus_model("demo")
    if folder.exists():
        shutil.rmtree(folder)
    with model.settings(DocumentLimits(keep=limit, select=LOWEST), progress=progress) as settings:
        store = DirectoryStore(folder)
        report = build_corpus(store, NAMESPACE, documents, model.tokenize, settings)
    scored = f"; perplexities {report.perplexities}, kept {report.kept_perplexities}"
    typer.echo(
        f"kept {report.num_kept} of {report.num_read} documents, {report.num_tokens} tokens, "
        f"{report.num_bytes} bytes; dropped {report.dropped}{scored if limit else ''}"
    )


def demo_documents() -> list[Document]:
    """Everything that the demo models were trained on and that no held-out prompt is cut from."""
    return [document for file in training_files() for document in cut(file)]


def cut(file: SourceFile) -> Iterator[Document]:
    """Documents of whole paragraphs, of about `DOCUMENT_CHARS`, in order."""
    text = ""
    for paragraph in file.text.split("\n\n"):
        text = f"{text}\n\n{paragraph}" if text else paragraph
        if len(text) >= DOCUMENT_CHARS:
            yield Document(file.name, text)
            text = ""
    if text:
        yield Document(file.name, text)


if __name__ == "__main__":
    typer.run(main)
