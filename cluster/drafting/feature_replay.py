"""Which states of a request's tokens a drafter lacks, and what has come of them meanwhile."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from ...core.proposals import FeatureRows


class FeatureReplay:
    """States of one request as one drafter has been handed them, for one that wants them all.

    Until some are missing nothing is kept here. From then on all are, those that come with steps
    and those that are computed again, until they are whole from the first that was missing to the
    newest: the drafter is handed these together, and reads its text anew from there.

    most_rows  that are kept; a text that would take more stays as it is
    """

    __slots__ = ("_filling", "_later", "_most_rows", "_num_known", "_reaches")

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        # States of the first tokens that the drafter has.
        self._num_known = 0
        # What has come behind these without a gap, up to a position, and what stands further on.
        self._filling: list[FeatureRows] = []
        self._reaches = 0
        self._later: list[FeatureRows] = []

    def missing(self, end: int) -> tuple[int, int] | None:
        """Positions, from one to before another, of the first states that lack before `end`."""
        stop = self._later[0].position if self._later else end
        is_long = end - self._num_known > self._most_rows
        return None if is_long or self._reaches >= stop else (self._reaches, stop)

    def note(self, rows: FeatureRows) -> FeatureRows | None:
        """Take rows that have come; what the drafter is to be handed beside them, if anything."""
        if rows.position > self._reaches:
            insort(self._later, rows, key=attrgetter("position"))
            self._forget_if_long()
            return None
        had_gap = bool(self._filling or self._later)
        self._fill(rows)
        while self._later and self._later[0].position <= self._reaches:
            self._fill(self._later.pop(0))
        if self._later:
            return None
        whole = _joined(self._filling) if had_gap and self._filling else None
        self._num_known, self._filling = self._reaches, []
        return whole

    def _fill(self, rows: FeatureRows) -> None:
        """Add what of the rows goes on behind those that are there."""
        known = self._reaches - rows.position
        if known < len(rows.values):
            self._filling.append(rows._replace(position=self._reaches, values=rows.values[known:]))
            self._reaches += len(rows.values) - known

    def _forget_if_long(self) -> None:
        """Of a text that would take more rows nothing is kept: it is taken for known."""
        newest = self._later[-1]
        end = newest.position + len(newest.values)
        if end - self._num_known > self._most_rows:
            self._filling, self._later = [], []
            self._num_known = self._reaches = end


def _joined(parts: Iterable[FeatureRows]) -> FeatureRows:
    first, *rest = parts
    return first._replace(values=np.concatenate([first.values, *(part.values for part in rest)]))
