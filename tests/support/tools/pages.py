"""Sections of the pages of docs/, and the tables in them."""

from __future__ import annotations

import re
from pathlib import Path

from .tree_copy import ROOT

DOCS = ROOT / "docs"
RESULTS_PAGE = DOCS / "results.md"


def sections(page: Path, level: int = 2) -> dict[str, str]:
    """Heading -> text of each section of a page, subsections included."""
    marks = "#" * level
    _, *parts = re.split(rf"(?m)^{marks} ", page.read_text(encoding="utf-8"))
    split = (part.partition("\n") for part in parts)
    return {heading: text for heading, _, text in split}


def headings(page: Path) -> set[str]:
    """Headings of a page, of every level."""
    return set(re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8")))


def table_rows(heading: str, page: Path = RESULTS_PAGE) -> set[str]:
    """Lines of the tables of a section, headers included. Raises `KeyError` for no such section."""
    rows = {line for line in sections(page)[heading].splitlines() if line.startswith("|")}
    assert rows, f"{heading} has no table"
    return rows
