"""Tables of what was found: Markdown for docs, and the console."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .cases import Found, Load, Measured

HEAD = (
    "prompts", "T", "drafters", "stages", "requests", "plain", "rounds", "streamed",
    "streamed / rounds", "streamed / plain", "tau", "slices a token", "rows a slice", "killed",
    "stage 0 idle", "host",
)  # fmt: skip
Row = tuple[str, ...]


def rows(measured: Sequence[Measured]) -> list[Row]:
    """A row for each load; ratios are medians of the rounds, with their range."""
    return [_row(one) for one in measured]


def _row(one: Measured) -> Row:
    load, by_mode = one.load, one.found
    streamed, rounds = by_mode["streamed"], by_mode["rounds"]
    speeds = [f"{_median(by_mode[mode], 'tokens_s'):.0f}" for mode in by_mode]
    return (
        *_names(load),
        *speeds,
        _ratios(streamed, rounds),
        _ratios(streamed, by_mode["plain"]),
        f"{_median(rounds, 'tau'):.2f}",
        f"{1 / _median(streamed, 'tau'):.2f}",
        f"{_median(streamed, 'rows'):.1f}",
        f"{_median(streamed, 'killed'):.0%}",
        f"{_median(streamed, 'idle'):.0%} ({_median(rounds, 'idle'):.0%})",
        f"{_median(streamed, 'host'):.0%}",
    )


def _names(load: Load) -> Row:
    return (
        load.prompts, f"{load.temperature:g}", load.drafters, str(load.stages), str(load.together)
    )  # fmt: skip


def _ratios(found: Sequence[Found], base: Sequence[Found]) -> str:
    ratios = [one.tokens_s / other.tokens_s for one, other in zip(found, base, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _median(found: Sequence[Found], name: str) -> float:
    return statistics.median(getattr(one, name) for one in found)
