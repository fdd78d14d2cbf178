"""Leaves out drafters that are not worth the time that they take.

Formula: docs/algorithms/token_trees.md, "Source choice".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

# Weight of the newest step in what a drafter is expected to bring.
WEIGHT = 0.05
# A drafter is left out only where it clearly costs more than it brings.
MARGIN = 0.9
# Steps that a new drafter gets to prove itself.
TRIAL_STEPS = 16
# After so many steps without it, a drafter gets some more: texts change.
EXPLORE_EVERY = 96
EXPLORE_STEPS = 4


class SourceChoice:
    """Compares the tokens that only a drafter brings with the seconds that it takes, step by step.

    An accepted node that several drafters proposed is attributed to the one that takes least time,
    so that of two alike the dearer one is left out.
    """

    __slots__ = ("_asked", "_gains", "_unasked")

    def __init__(self) -> None:
        self._gains: dict[str, float] = {}
        self._asked: dict[str, int] = {}
        self._unasked: dict[str, int] = {}

    def left_out(self, costs: Mapping[str, float], seconds_a_token: float) -> frozenset[str]:
        """Drafters that this step goes without.

        costs            seconds that each drafter takes in a step
        seconds_a_token  what an accepted token saves
        """
        out = set()
        for source, cost in costs.items():
            is_known = self._asked.get(source, 0) >= TRIAL_STEPS
            if is_known and self._gains[source] * seconds_a_token < MARGIN * cost:
                out.add(source)
                self._unasked[source] = self._unasked.get(source, 0) + 1
                if self._unasked[source] == EXPLORE_EVERY:
                    self._unasked[source] = 0
                    self._asked[source] = TRIAL_STEPS - EXPLORE_STEPS
        return frozenset(out)

    def learn(
        self, costs: Mapping[str, float], asked: Collection[str], accepted: Mapping[str, int]
    ) -> None:
        """Learn from a step: which drafters it asked, and the accepted nodes of each."""
        for source in asked:
            if source in costs:
                count = self._asked[source] = self._asked.get(source, 0) + 1
                old = self._gains.get(source, 0.0)
                weight = max(WEIGHT, 1 / count)
                self._gains[source] = old + weight * (accepted.get(source, 0) - old)
