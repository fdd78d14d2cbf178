"""A corpus' documents: read from files, filtered, and turned into tokens.

Parquet files need pyarrow (`pip install 'draftline[corpus]'`). The filter drops documents that
would harm a retrieval store, such as licence texts, and gives the reason.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import Bool, Int32, Int64
from ...core.errors import ConfigError

ROWS_AT_ONCE = 1024
SUFFIXES = (".jsonl", ".md", ".parquet", ".py", ".txt")
CHAT_FIELDS = ("messages", "conversations")
# Fields whose joined texts make a document; the first entry whose fields are in the row is used.
TEXT_FIELDS = (("text",), ("content",), ("prompt", "completion"))
FIELDS = (*CHAT_FIELDS, *(name for names in TEXT_FIELDS for name in names))
# Names that data sets use for the speakers, including ShareGPT's.
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
# Phrases from the notices of the Apache, MIT, BSD, ISC, GNU, Mozilla and Python licences that are
# rare elsewhere.
PHRASES = re.compile(
    r"""
    copyright\ (\(c\)|©|[12][0-9]{3})
    | all\ rights\ reserved
    | spdx-license-identifier
    | licen[sc]ed\ (to|under)
    | under\ the\ (terms|licen[sc]e)
    | licen[sc]e\ agreement
    | (general|lesser|mozilla)\ public\ licen[sc]e
    | permission\ (is\ hereby\ granted|to\ use,\ copy)
    | (this|above)\ (copyright|permission)\ notice
    | copyright\ (notice|holder|owner)
    | redistributions?\ (and\ use|of\ source|in\ binary|must)
    | (with|without)\ warrant(y|ies)
    | "?as[ ]is"?\ (basis|and|,|without)
    | warranties\ of\ merchantability
    | fitness\ for\ a\ particular\ purpose
    | in\ no\ event\ shall
    | (in)?direct,\ indirect|consequential\ damages
    | apache\.org/licenses | gnu\.org/licenses | opensource\.org/licenses
    | compliance\ with\ the\ licen[sc]e
    | required\ by\ applicable\ law
    | free\ software\ foundation
    """,
    re.VERBOSE | re.IGNORECASE,
)
MARKERS = re.compile(r"^[ \t]*(?:#+|//+|/?\*+/?|;+|--|%+|<!--|\"{3}|'{3})?[ \t]*", re.MULTILINE)
# A paragraph is a notice if it has one phrase for this many characters, a sentence or two.
CHARS_A_PHRASE = 300
# Length of the word runs that are compared; one run in `RUN_SAMPLE` is remembered.
RUN_WORDS = 8
RUN_SAMPLE = 16
# A document of fewer sampled runs is too short to be called a near copy.
MIN_RUNS = 4


# Rows in memory at once.
class Span(NamedTuple):
    """Characters `start` to `stop` of a text."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Document:
    """One text; `name` is its source, such as `notes.jsonl:12`.

    answers  spans that are scored by the target, ascending; None: the whole text
    """

    name: str
    text: str
    answers: tuple[Span, ...] | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; the role is `system`, `user`, `assistant` or `tool`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Turns that a model's chat template makes a document of."""

    name: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A document that could not be read, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class TokenizedDocument:
    """A document's tokens.

    ids        int32 [n]
    is_scored  bool [n]  tokens whose probability counts in the document's perplexity; None: all
    """

    ids: Int32
    is_scored: Bool | None = None

    def num_scored(self, start: int, stop: int) -> int:
        """Number of scored tokens from `start` to `stop`."""
        if self.is_scored is None:
            return max(0, stop - start)
        return int(np.count_nonzero(self.is_scored[start:stop]))

    def scored_places(self, start: int, stop: int) -> Int64:
        """Places of the scored tokens from `start` to `stop`, ascending: int64 [m]."""
        if self.is_scored is None:
            return np.arange(start, stop, dtype=np.int64)
        return start + np.flatnonzero(self.is_scored[start:stop])


Found = Document | Chat | Unreadable


def parquet_rows(file: Path) -> Iterator[Document | Chat | Unreadable]:
    """The documents of a parquet file, one a row, named `FILE:ROW` from 1.

    Reads only the columns that `read_row` uses. Raises `ConfigError` where pyarrow is missing.
    """
    try:
        arrow = import_module("pyarrow")
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        message = f"{file} needs pyarrow: pip install 'draftline[corpus]'"
        raise ConfigError("input", message) from error
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for row in _rows(table):
                number += 1
                yield read_row(f"{file}:{number}", row)
    except (arrow.ArrowException, OSError):
        yield Unreadable(f"{file}:{number + 1}", "bad parquet file")


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    columns = [name for name in table.schema_arrow.names if name in FIELDS]
    for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
        yield from batch.to_pylist()


def read_documents(paths: Iterable[Path]) -> Iterator[Found]:
    """The documents of files, and of the files in folders, sorted by path.

    .txt, .md and .py files are one document each; a line of a .jsonl file and a row of a .parquet
    file is one, as `read_row` takes it. Files, lines and rows that cannot be read are `Unreadable`.
    Raises `ConfigError` for a path that does not exist or is of another kind, and for .parquet
    files where pyarrow is missing.
    """
    for path in paths:
        for file in _files_of(path):
            if file.suffix == ".jsonl":
                yield from _json_lines(file)
            elif file.suffix == ".parquet":
                yield from parquet_rows(file)
            else:
                yield _whole(file)


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
        if not files:
            raise ConfigError("input", f"{path} holds no {', '.join(SUFFIXES)} file")
        return sorted(files)
    if not path.is_file():
        raise ConfigError("input", f"{path} does not exist")
    if path.suffix not in SUFFIXES:
        raise ConfigError("input", f"{path} is not one of {', '.join(SUFFIXES)}; convert it")
    return [path]


def _whole(file: Path) -> Document | Unreadable:
    try:
        return Document(str(file), file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return Unreadable(str(file), "not UTF-8")


def _json_lines(file: Path) -> Iterator[Found]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_line(f"{file}:{number}", line)


def _json_line(name: str, line: bytes) -> Found:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Unreadable(name, "not UTF-8")
    except json.JSONDecodeError:
        return Unreadable(name, "bad JSON line")
    return read_row(name, row) if isinstance(row, dict) else Unreadable(name, "bad JSON line")


def read_row(name: str, row: Mapping[str, Any]) -> Document | Chat | Unreadable:
    """The document of one row of named fields.

    A chat has `messages` (of `role` and `content`) or `conversations` (ShareGPT: of `from` and
    `value`); a text has `text`, `content`, or `prompt` and `completion`. Any other row gives
    `Unreadable`.
    """
    for one in CHAT_FIELDS:
        if row.get(one) is not None:
            return _chat(name, row[one])
    for fields in TEXT_FIELDS:
        parts = [row.get(one) for one in fields]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return Document(name, "".join(texts))
    return Unreadable(name, "no text field")


def _chat(name: str, entries: Any) -> Chat | Unreadable:
    turns = entries if isinstance(entries, list) else []
    messages = tuple(message for turn in turns if (message := _message(turn)) is not None)
    if not messages or len(messages) < len(turns):
        return Unreadable(name, "bad chat")
    if all(message.role != "assistant" for message in messages):
        return Unreadable(name, "chat without an answer")
    return Chat(name, messages)


def _message(entry: Any) -> Message | None:
    if not isinstance(entry, dict):
        return None
    role = ROLES.get(str(entry.get("role") or entry.get("from")).lower())
    content = _content(entry["content"] if "content" in entry else entry.get("value"))
    return None if role is None or content is None else Message(role, content)


def _content(value: Any) -> str | None:
    """A text, or the texts of a list of parts; None for anything else, such as a picture."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    texts = [part.get("text") for part in value if isinstance(part, dict)]
    parts = [text for text in texts if isinstance(text, str)]
    return "".join(parts) if parts and len(parts) == len(value) else None


def licence_share(text: str) -> float:
    """The share, 0 to 1, of characters in licence and copyright notices.

    White space is not counted, nor are comment markers at the start of lines.
    """
    total = notices = 0
    for paragraph in re.split(r"\n\s*\n", MARKERS.sub("", text)):
        plain = " ".join(paragraph.split())
        total += len(plain)
        if len(plain) <= CHARS_A_PHRASE * len(PHRASES.findall(plain)):
            notices += len(plain)
    return notices / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRules:
    """The rules that a document must pass.

    min_tokens             shorter ones hold little to continue, and their perplexity is noise
    min_compression_ratio  compressed size / size; below it a text is one line over and over, which
                           has a low perplexity and would be kept by refinement
    max_licence_share      largest share of the text in licence and copyright notices
    max_overlap            largest share of sampled word runs that earlier documents have
    """

    min_tokens: int = 64
    min_compression_ratio: float = 0.05
    max_licence_share: float = 0.5
    max_overlap: float = 0.8

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ConfigError("min_tokens", f"must be at least 1, got {self.min_tokens}")
        for name in ("min_compression_ratio", "max_licence_share", "max_overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, f"must be from 0 to 1, got {getattr(self, name)}")


@dataclass(slots=True)
class DocumentFilter:
    """Names the reason to drop a document; remembers documents that are kept."""

    rules: DocumentRules = field(default_factory=DocumentRules)
    _seen: set[bytes] = field(default_factory=set)
    _runs: set[int] = field(default_factory=set)

    def text_fault(self, text: str) -> str | None:
        """The reason to drop a text: it repeats itself, is a licence, or a copy; None: it is kept.

        White space is ignored when texts are compared.
        """
        words = text.split()
        plain = " ".join(words).encode("utf-8", errors="surrogatepass")
        if len(plain) > 0 and _compression_ratio(plain) < self.rules.min_compression_ratio:
            return "repetitive"
        digest = hashlib.sha256(plain).digest()
        if digest in self._seen:
            return "duplicate"
        if licence_share(text) > self.rules.max_licence_share:
            return "licence"
        runs = _sampled_runs(words)
        if len(runs) >= MIN_RUNS and len(runs & self._runs) > self.rules.max_overlap * len(runs):
            return "near duplicate"
        self._seen.add(digest)
        self._runs |= runs
        return None

    def length_fault(self, num_tokens: int) -> str | None:
        """The reason to drop a document of this length; None: it is kept."""
        return "too short" if num_tokens < self.rules.min_tokens else None


def _compression_ratio(plain: bytes) -> float:
    return len(zlib.compress(plain)) / len(plain)


def _sampled_runs(words: list[str]) -> set[int]:
    """Hashes of the runs that are divisible by `RUN_SAMPLE`: the same ones in every copy (Manber,
    USENIX 1994)."""
    runs = (
        " ".join(words[start : start + RUN_WORDS]) for start in range(len(words) - RUN_WORDS + 1)
    )
    hashes = (zlib.crc32(run.encode("utf-8", errors="surrogatepass")) for run in runs)
    return {value for value in hashes if value % RUN_SAMPLE == 0}
