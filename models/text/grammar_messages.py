"""Messages between an engine and its grammar process, and literals of llguidance's Lark."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarSetup:
    """The first message: the model's tokenizer, as a `tokenizer.json`, and limits."""

    tokenizer: str
    vocab_size: int
    end_ids: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Started:
    """The answer to it. `error`: why this tokenizer supports no grammar, which ends the process."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Follow:
    """A call: which tokens a grammar allows after the committed tokens and in a tree.

    grammar    kind and value; None: the process has the grammar already
    committed  answer tokens since the grammar's last call, or all of them if `grammar` is given
    tokens, parents  of the tree after them; a parent of -1 is the root
    """

    call_id: int
    form_id: int
    grammar: tuple[str, str] | None
    committed: tuple[int, ...]
    tokens: list[int]
    parents: list[int]


@dataclass(frozen=True, slots=True)
class Followed:
    """The answer: rows of the tree that are allowed, and their masks as bytes, row by row.

    error  why the grammar cannot be used; empty if it can
    """

    call_id: int
    rows: tuple[int, ...]
    masks: bytes
    error: str


@dataclass(frozen=True, slots=True)
class Close:
    """A grammar is not needed any more."""

    form_id: int


_ESCAPED_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)


def lark_text(text: str) -> str:
    """A text as a literal: a JSON string, but for U+007F, which Lark takes escaped only."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def lark_choice(texts: list[str]) -> str:
    """The body of a rule for one of some texts."""
    return " | ".join(map(lark_text, texts))


def lark_regex(expression: str) -> str:
    """A regular expression as a literal: between slashes, so its own ones are escaped."""
    escaped = _ESCAPED_OR_SLASH.sub(lambda part: part[0] if part[0] != "/" else r"\/", expression)
    return f"/{escaped}/"
