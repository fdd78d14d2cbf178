"""How deep drafts become: another level is drafted where it saves what it takes.

docs/drafters.md, "Levels that pay".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol


class GrowingDraft(Protocol):
    """A draft on its way."""

    @property
    def reach(self) -> float:
        """How probable it is that the text goes through what the next level is drafted behind.

        Infinite: the level is drafted whatever it is worth.
        """
        ...


class PayingDepth:
    """Says after each level of a batch of drafts whether another one pays.

    Of the texts that come as far as a level, as many are expected to go through the next one as
    went on from the level before (cf. Brown et al., Dynamic Depth Decoding, arXiv 2409.00142).
    """

    __slots__ = ("_before", "_level_tokens")

    def __init__(self, level_tokens: float) -> None:
        """`level_tokens` must be expected of a level (`core.proposals.level_tokens`)."""
        self._level_tokens = level_tokens
        # Texts that came as far as the last level; at first all of them.
        self._before = 0.0

    def goes_on(self, drafts: Sequence[GrowingDraft]) -> bool:
        """Whether another level is drafted for these."""
        reach = sum(draft.reach for draft in drafts)
        if not drafts or reach == inf:
            return bool(drafts)
        before, self._before = self._before or len(drafts), reach
        return reach * min(reach / before, 1.0) >= self._level_tokens
