"""Tables of what was found: Markdown for docs, and the console."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol

from .cases import Load, Measured

HEAD = (
    "prompts", "T", "drafters", "stages", "requests", "plain", "rounds", "streamed",
    "streamed / rounds", "streamed / plain", "tau", "slices a token", "rows a slice", "killed",
    "stage 0 idle", "host",
)  # fmt: skip
Row = tuple[str, ...]


class Timed(Protocol):
    """A round that was measured."""

    @property
    def tokens_s(self) -> float:
        """Tokens a second."""
        ...


def rows(measured: Sequence[Measured]) -> list[Row]:
    """A row for each load; ratios are medians of the rounds, with their range."""
    return [_row(one) for one in measured]


def _row(one: Measured) -> Row:
    load, by_mode = one.load, one.found
    streamed, rounds = by_mode["streamed"], by_mode["rounds"]
    speeds = [f"{median_of(by_mode[mode], 'tokens_s'):.0f}" for mode in by_mode]
    return (
        *names_of(load),
        *speeds,
        ratios(streamed, rounds),
        ratios(streamed, by_mode["plain"]),
        f"{median_of(rounds, 'tau'):.2f}",
        f"{1 / median_of(streamed, 'tau'):.2f}",
        f"{median_of(streamed, 'rows'):.1f}",
        f"{median_of(streamed, 'killed'):.0%}",
        f"{median_of(streamed, 'idle'):.0%} ({median_of(rounds, 'idle'):.0%})",
        f"{median_of(streamed, 'host'):.0%}",
    )


def names_of(load: Load) -> Row:
    """The first cells of a load's row."""
    return (
        load.prompts, f"{load.temperature:g}", load.drafters, str(load.stages), str(load.together)
    )  # fmt: skip


def ratios(found: Sequence[Timed], base: Sequence[Timed], digits: int = 2) -> str:
    """Speeds of rounds over those of the same rounds otherwise: their median and range."""
    own = [one.tokens_s / other.tokens_s for one, other in zip(found, base, strict=True)]
    median, least, most = (
        f"{one:.{digits}f}" for one in (statistics.median(own), min(own), max(own))
    )
    return f"{median} ({least}-{most})"


def median_of(found: Sequence[Timed], name: str) -> float:
    """Of a field of the rounds."""
    return statistics.median(getattr(one, name) for one in found)
