"""The first steps of an engine: every drafter is asked, so that what each brings beside the others
is known from the beginning.

To try them one by one would take their accounts far longer, and tell nothing of what two say
together. All of them together bring more than any, so that it costs little.
"""

from __future__ import annotations

import numpy as np

from ...arrays import Bool, Int64
from ...reach import NUM_REACHES
from .kernels import BEYOND, MESSAGE, QUERY, WEIGHT
from .known import NUM_REGIMES, Known

# Steps of each reach.
FIRST_STEPS = 12.0


class Introductions:
    """Takes requests in turns: one in each step."""

    __slots__ = ("_turn",)

    def __init__(self) -> None:
        self._turn = 0

    def next(self, known: Known, allowed: Bool, most_s: float) -> tuple[int, Int64]:
        """A request's place, and after which outcomes each drafter is hardly known: int64
        [drafters], bits of `core/reach.py`; none of those that it does not take.

        allowed  bool [requests, drafters]
        most_s   what takes longer is not introduced
        """
        place = self._turn % len(allowed)
        self._turn = place + 1
        drafters = np.arange(allowed.shape[1])
        steps = known.levels[0, drafters, BEYOND + drafters, :, WEIGHT]
        steps = steps.reshape(len(drafters), NUM_REGIMES, NUM_REACHES).sum(axis=1)
        bits = ((steps < FIRST_STEPS) << np.arange(NUM_REACHES)).sum(axis=1)
        is_cheap = known.costs[:, MESSAGE] + known.costs[:, QUERY] <= most_s
        return place, np.where(allowed[place] & is_cheap, bits, 0)
