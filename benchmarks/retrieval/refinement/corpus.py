"""Text of installed packages that the demo models were not trained on, by its kind.

Python is near to what they learned; C, HTML, prose and lists of files are not.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ....deploy.cli.corpus.model import CorpusModel
from ....deploy.cli.demo.build_store import cut
from ....retrieval_store.corpus.document_filter import DocumentFilter, DocumentRules
from ....retrieval_store.corpus.documents import Document, TokenizedDocument
from ....training.corpus import DEPENDENCIES, MORE_DEPENDENCIES, SourceFile

# Kind -> patterns of its files, below the folder of installed packages.
NEAR = {"python": ("*.py",)}
FAR = {
    "c": ("*.h", "*.c", "*.cpp"),
    "html": ("*.html",),
    "prose": ("METADATA", "*.md", "*.rst"),
    "lists": ("RECORD",),
}
MAX_FILE_BYTES = 200_000
# Of one file; larger ones would be most of a kind.
MAX_DOCUMENTS = 4


def corpus(
    model: CorpusModel, num_tokens: int, far_share: float, *, drops_compressible: bool = True
) -> list[TokenizedDocument]:
    """About `num_tokens`, of which `far_share` (0 to 1) are unlike what the models learned.

    The kinds that are far have equal parts. `drops_compressible`: as `draftline corpus build` does.
    """
    floor = DocumentRules().min_compression_ratio if drops_compressible else 0.0
    sieve = DocumentFilter(DocumentRules(min_compression_ratio=floor))
    parts = {kind: num_tokens * far_share / len(FAR) for kind in FAR}
    parts["python"] = num_tokens * (1 - far_share)
    found: list[TokenizedDocument] = []
    for kind, wanted in parts.items():
        size = 0
        for text in _texts(kind):
            if size >= wanted:
                break
            if sieve.text_fault(text.text) is not None:
                continue
            document = model.tokenize(text)
            if sieve.length_fault(len(document.ids)) is None:
                found.append(document)
                size += len(document.ids)
    return found


def _texts(kind: str) -> Iterator[Document]:
    """Parts of the files of a kind, each file's first ones; in an order of chance."""
    known = {*DEPENDENCIES, *MORE_DEPENDENCIES}
    root = Path(sysconfig.get_paths()["purelib"])
    patterns = {**NEAR, **FAR}[kind]
    paths = sorted(
        path
        for pattern in patterns
        for path in root.rglob(pattern)
        if path.relative_to(root).parts[0] not in known
        and path.is_file()
        and path.stat().st_size <= MAX_FILE_BYTES
    )
    random.Random(0).shuffle(paths)
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield from islice(cut(SourceFile(path.name, text)), MAX_DOCUMENTS)
