"""What drafters that draft at the end of a step were told to draft, until the next step takes it.

The decision about them is made a step before the drafts are there. So that what they brought is
learned of the decision that it came of, it is kept until then.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...arrays import Int64


class DraftOrders:
    """Choices of the step before, by request: int64 [drafters], 0 for drafters of other kinds."""

    __slots__ = ("_by_request",)

    def __init__(self) -> None:
        self._by_request: dict[str, Int64] = {}

    def begin(self, request_id: str, orders: Int64) -> None:
        """What is drafted behind a request's prompt."""
        if orders.any():
            self._by_request[request_id] = orders

    def exchange(self, ids: Sequence[str], choices: Int64, orders: Int64) -> Int64:
        """The choices of this step, int64 [requests, drafters]: with what was ordered in the step
        before in place of `orders`, the part of `choices` that is kept now for the next step.
        """
        if not self._by_request and not orders.any():
            return choices
        due = choices - orders
        for place, request_id in enumerate(ids):
            before = self._by_request.pop(request_id, None)
            if before is not None:
                # Drafters may have been added since.
                due[place, : len(before)] += before
            self.begin(request_id, orders[place])
        return due

    def forget(self, request_id: str) -> None:
        """The request has ended; an unknown id is ignored."""
        self._by_request.pop(request_id, None)
