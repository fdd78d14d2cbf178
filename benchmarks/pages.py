"""Generated parts of pages, between two marks, and their tables."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.errors import ConfigError


def replaced(page: str, part: str, name: str) -> str:
    """A page in which the part with this name, between its marks, is replaced.

    The marks are lines `<!-- NAME: begin -->` and `<!-- NAME: end -->`. Raises `ConfigError` where
    the page has none.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ConfigError("docs", f"the page has no lines {begin} and {end}")
    return f"{before}{begin}\n\n{part}\n\n{end}{after}"


def markdown_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of such columns, in Markdown."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
