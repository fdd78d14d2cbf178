"""Confidence intervals of tau: a bootstrap over prompts, with the same draws for every setting.

A draw takes as many prompts as there are, with replacement (Efron 1979); tau is the sum of their
tokens over the sum of their steps. Settings share the draws, so that the difficulty of prompts
cancels in their difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.arrays import Float64
from ..runs.matched import Run, Runs

NUM_DRAWS = 4000
# Ends of the intervals, in percent of the draws.
ENDS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """The verdict on a difference: whether it is significant."""
        if self.low > 0:
            return "higher"
        return "lower" if self.high < 0 else "undecided"


@dataclass(frozen=True, slots=True)
class TauRow:
    """tau of one setting.

    difference   to the setting above; None of the first
    by_category  if prompts have several categories, in their order
    by_prompt    of each prompt: committed tokens and steps of all rounds
    """

    name: str
    tau: Interval
    difference: Interval | None
    by_category: dict[str, Interval]
    by_prompt: tuple[tuple[int, int], ...] = ()


def tau_rows(runs: Runs, categories: Sequence[str]) -> tuple[TauRow, ...]:
    """A row for each setting that counts steps; `categories` of the prompts, in their order.

    All turns of a conversation are drawn together.
    """
    counts = {name: counts_of(runs[name]) for name in runs}
    names = [name for name, known in counts.items() if known is not None]
    if not names:
        return ()
    totals = np.stack([known for known in counts.values() if known is not None])
    kinds = list(dict.fromkeys(categories))
    whole, drawn = drawn_taus(totals)
    parts = {}
    if len(kinds) > 1:
        places = np.array([kinds.index(category) for category in categories])
        parts = {kind: drawn_taus(totals[:, places == at]) for at, kind in enumerate(kinds)}
    return tuple(
        TauRow(
            name,
            interval(whole[row], drawn[:, row]),
            interval(whole[row] - whole[row - 1], drawn[:, row] - drawn[:, row - 1])
            if row
            else None,
            {kind: interval(taus[row], draws[:, row]) for kind, (taus, draws) in parts.items()},
            tuple((int(tokens), int(steps)) for tokens, steps in totals[row].tolist()),
        )
        for row, name in enumerate(names)
    )


def counts_of(rounds: Sequence[Run]) -> Float64 | None:
    """float64 [prompts, 2]: committed tokens and steps of all rounds; None if a record has no
    counts."""
    rows: list[list[tuple[int, int]]] = []
    for run in rounds:
        prompts: list[tuple[int, int]] = []
        for record in run.records:
            if record.counts is None:
                return None
            own = record.counts.committed, record.counts.num_steps
            if record.turn:
                before = prompts.pop()
                own = before[0] + own[0], before[1] + own[1]
            prompts.append(own)
        rows.append(prompts)
    return np.array(rows, dtype=np.float64).sum(axis=0)


def drawn_taus(totals: Float64) -> tuple[Float64, Float64]:
    """float64 [settings], tau of all prompts, and float64 [draws, settings] of bootstrap draws.

    totals  float64 [settings, prompts, 2]
    """
    count = totals.shape[1]
    rng = np.random.default_rng(0)
    weights = rng.multinomial(count, np.full(count, 1 / count), NUM_DRAWS).astype(np.float64)
    drawn = np.einsum("dp,spk->dsk", weights, totals, optimize=True)
    whole = totals.sum(axis=1)
    return _ratio(whole), _ratio(drawn)


def _ratio(totals: Float64) -> Float64:
    """Tokens a step; 1 before any, as in `SpecCounts.tau`."""
    tokens, steps = totals[..., 0], totals[..., 1]
    return np.where(steps > 0, tokens / np.maximum(steps, 1.0), 1.0)


def interval(value: float, drawn: Float64) -> Interval:
    """The 95 % interval of a value, from draws of it."""
    low, high = np.percentile(drawn, ENDS)
    return Interval(float(value), float(low), float(high))
