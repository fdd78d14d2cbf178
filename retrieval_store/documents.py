"""Reads corpus files into documents and drops those that would harm a retrieval store."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..core.errors import ConfigError

SUFFIXES = (".jsonl", ".md", ".py", ".txt")


@dataclass(frozen=True, slots=True)
class Document:
    """One text; `name` tells where it came from, such as `notes.jsonl:12`."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands where a document could not be read."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRules:
    """What makes a document unfit.

    min_tokens             shorter ones hold little to continue, and their perplexity is noise
    min_compression_ratio  compressed size / size; below it a text is one line over and over, which
                           has a low perplexity and would be kept by refinement
    """

    min_tokens: int = 64
    min_compression_ratio: float = 0.05


@dataclass(slots=True)
class DocumentFilter:
    """Accepts each document once. Counts in `dropped`, by reason, what it refuses."""

    rules: DocumentRules = field(default_factory=DocumentRules)
    dropped: Counter[str] = field(default_factory=Counter)
    _seen: set[bytes] = field(default_factory=set)

    def accepts_text(self, text: str) -> bool:
        """False for a copy (white space aside) of an earlier text, and for degenerate text."""
        words = " ".join(text.split()).encode("utf-8", errors="surrogatepass")
        digest = hashlib.sha256(words).digest()
        if digest in self._seen:
            self.dropped["duplicate"] += 1
            return False
        self._seen.add(digest)
        if words and len(zlib.compress(words)) < self.rules.min_compression_ratio * len(words):
            self.dropped["repetitive"] += 1
            return False
        return True

    def accepts_length(self, num_tokens: int) -> bool:
        """False for a document of too few tokens."""
        if num_tokens < self.rules.min_tokens:
            self.dropped["too short"] += 1
            return False
        return True


def read_documents(paths: Iterable[Path]) -> Iterator[Document | Unreadable]:
    """The documents of files, and of the files in folders, sorted by path.

    .txt, .md and .py files are one document each. A line of a .jsonl file is a document: an
    object with a `text`, or with `prompt` and `completion`. Files and lines that cannot be read
    are `Unreadable`. Raises `ConfigError` for a path that does not exist or is
    of another kind.
    """
    for path in paths:
        for file in _files_of(path):
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                yield Unreadable(str(file), "not UTF-8")
                continue
            if file.suffix == ".jsonl":
                yield from _json_lines(file, text)
            else:
                yield Document(str(file), text)


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
        if not files:
            raise ConfigError("files", f"{path} holds no {', '.join(SUFFIXES)} file")
        return sorted(files)
    if not path.is_file():
        raise ConfigError("files", f"{path} does not exist")
    if path.suffix not in SUFFIXES:
        raise ConfigError("files", f"{path} is not one of {', '.join(SUFFIXES)}; convert it")
    return [path]


def _json_lines(file: Path, text: str) -> Iterator[Document | Unreadable]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            name, content = f"{file}:{number}", _json_text(line)
            is_read = content is not None
            yield Document(name, content) if is_read else Unreadable(name, "bad JSON line")


def _json_text(line: str) -> str | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(entry, dict):
        return None
    fields = ("text",) if "text" in entry else ("prompt", "completion")
    parts = [entry.get(name) for name in fields]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None
