"""Command lines that pages print: those of shell blocks, and those in a line of text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .tree_copy import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"(?ms)^```sh\n(.*?)^```")
FENCE = re.compile(r"(?ms)^```.*?^```")
# Commands of this package. A line that leaves something out says so with an ellipsis.
SPAN = re.compile(r"`((?:draftline [a-z]|python -m draftline\.)[^`…]*)`")
# Words of the shell that stand before a command, with the number of words that belong to each.
BEFORE = {"do": 1, "timeout": 2, "scripts/from_source.sh": 1}
ENDS = {"&&", "||", "|", ";", "&"}
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


@dataclass(frozen=True, slots=True)
class PrintedCommand:
    """A command of a page: its words without redirections, and the whole line as printed."""

    page: str
    line: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"

    def begins(self, text: str) -> bool:
        """Whether its words begin so."""
        return " ".join(self.words).startswith(text)


def block_commands(page: Path) -> list[PrintedCommand]:
    """All commands of a page's shell blocks, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        PrintedCommand(_name(page), line, words)
        for block in BLOCK.findall(text)
        for line in block_lines(block)
        for words in simple_commands(line)
    ]


def span_commands(page: Path) -> list[PrintedCommand]:
    """Commands of this package that stand in the text, with or without their arguments."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [
        PrintedCommand(_name(page), line, tuple(shlex.split(line)))
        for line in (" ".join(span.split()) for span in SPAN.findall(text))
    ]


def block_lines(block: str) -> Iterator[str]:
    """Lines of a block that hold a command, each whole."""
    for line in block.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def simple_commands(line: str) -> Iterator[tuple[str, ...]]:
    """The commands that the shell would run for a line, also those that another one is told."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    words: list[str] = []
    tokens = [*reader, ";"]
    while tokens:
        token = tokens.pop(0)
        if token in ENDS:
            if words := _without_prefixes(words):
                yield tuple(words)
                # `ray exec FILE 'COMMAND'`: on another machine.
                if words[:2] == ["ray", "exec"]:
                    yield from simple_commands(words[-1])
            words = []
        elif set(token) <= {*"><&"}:
            # A redirection: `> FILE`, `< FILE`, or `2>&1`, whose digits are words here.
            if "&" in token:
                words.pop()
            tokens.pop(0)
        else:
            words.append(token)


def _without_prefixes(words: list[str]) -> list[str]:
    while words and (words[0] in BEFORE or ASSIGNMENT.fullmatch(words[0])):
        words = words[BEFORE.get(words[0], 1) :]
    return words


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()
