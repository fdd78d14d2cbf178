"""What drafters that draft at the end of a step are told to draft, until the next step takes it.

The decision about them is made a step before the drafts are there, and so for each outcome that the
step may have: they draft only after those for which they pay. So that what they brought is learned
of the decision that it came of, it is kept until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...arrays import Bool, Float64, Int64
from ...reach import NUM_REACHES
from .deciding import will_ask
from .kernels import ASKED, LEFT_OUT, TRIED, StepWishes
from .known import Known, with_reach

# What a request leaves of the weight of those before it, in counts of reaches.
REACH_DECAY = 0.99


class Order(NamedTuple):
    """What drafters are told for the next step, [drafters] of a request or [requests, drafters].

    choices  int64  as `decide` gives them; 0 for drafters of other kinds
    reaches  int64  after which outcomes of this step (bits of `core/reach.py`)
    """

    choices: Int64
    reaches: Int64

    def where_wanted(self, reached: Sequence[int], is_streamed: Sequence[bool]) -> Order:
        """Without those of streamed requests that need none behind a step such as the last one was:
        slices take nothing that is told ahead, and go on while copying goes on.
        """
        is_wanted = (self.reaches >> np.array(reached, dtype=np.int64)[:, None] & 1).any(axis=1)
        stays = is_wanted | ~np.array(is_streamed, dtype=np.bool_)
        return self._replace(reaches=self.reaches * stays[:, None])

    def by_drafter(self, ids: Sequence[str]) -> dict[int, dict[str, int]]:
        """The reaches of requests, by drafter; of those that draft at all."""
        found: dict[int, dict[str, int]] = {}
        for drafter in np.flatnonzero(self.reaches.any(axis=0)).tolist():
            pairs = zip(ids, self.reaches[:, drafter].tolist(), strict=True)
            found[drafter] = {request_id: reaches for request_id, reaches in pairs if reaches}
        return found


def order_for(
    known: Known, step: StepWishes, choices: Int64, forced: Int64, is_ahead: Bool
) -> Order:
    """Tell drafters to draft after the outcomes after which they pay.

    choices   int64 [requests, drafters]  of `decide`
    forced    int64, likewise  after which outcomes they draft whatever they bring
    is_ahead  bool [drafters]
    """
    paying = np.zeros_like(choices)
    if (step.allowed & is_ahead).any():
        for reach in range(NUM_REACHES):
            pays = will_ask(known, step._replace(cells=with_reach(step.cells, reach))) != LEFT_OUT
            paying |= pays.astype(np.int64) << reach
    told = np.where(paying > 0, ASKED, ASKED + TRIED)
    told = np.where(choices != LEFT_OUT, choices, told)
    return Order(told * is_ahead, (paying | forced) * is_ahead)


class DraftOrders:
    """Orders of the step before, by request, and the outcomes that steps had."""

    __slots__ = ("_by_request", "_num_reached")

    def __init__(self) -> None:
        self._by_request: dict[str, Order] = {}
        # By reach, decayed.
        self._num_reached: Float64 = np.ones(NUM_REACHES)

    def begin(self, request_id: str, order: Order) -> None:
        """What is drafted behind a request's prompt."""
        if order.reaches.any():
            self._by_request[request_id] = order

    def exchange(
        self, ids: Sequence[str], choices: Int64, orders: Order, reached: Sequence[int]
    ) -> Int64:
        """The choices of this step, int64 [requests, drafters]: `choices`, and what was ordered in
        the step before for outcomes such as it had.

        choices  of drafters that are not told ahead
        orders   kept now for the next step
        reached  the reach of each request's step before
        """
        self._num_reached *= REACH_DECAY ** len(reached)
        np.add.at(self._num_reached, list(reached), 1.0)
        if not self._by_request and not orders.reaches.any():
            return choices
        due = choices.copy()
        for place, request_id in enumerate(ids):
            before = self._by_request.pop(request_id, None)
            if before is not None:
                # Drafters may have been added since.
                is_due = before.reaches >> reached[place] & 1
                due[place, : len(is_due)] += before.choices * is_due
            self.begin(request_id, Order(orders.choices[place], orders.reaches[place]))
        return due

    def counts(self, ahead: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
        """For how many requests each drafter will draft, as outcomes were of late."""
        shares = self._num_reached / self._num_reached.sum()
        bits = np.arange(NUM_REACHES)
        return {
            name: sum(float(shares @ (reaches >> bits & 1)) for reaches in by_id.values())
            for name, by_id in ahead.items()
        }

    def forget(self, request_id: str) -> None:
        """The request has ended; an unknown id is ignored."""
        self._by_request.pop(request_id, None)
