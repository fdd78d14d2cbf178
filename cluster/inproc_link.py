"""A link to a drafter in the coordinator's own process: plain calls."""

from __future__ import annotations

import logging

from ..core.drafter import Drafter
from ..core.errors import DrafterError
from ..core.types import Proposal
from .drafter_link import MAX_NODES, DrafterMessage, LinkEvents

logger = logging.getLogger(__name__)


class InprocLink:
    """Calls a drafter directly. What the drafter raises becomes `failed`."""

    __slots__ = ("_drafter", "_events", "_open_ids", "max_nodes", "name")

    is_local = True

    def __init__(self, drafter: Drafter, max_nodes: int = MAX_NODES) -> None:
        self._drafter = drafter
        self._events: LinkEvents | None = None
        self._open_ids: set[str] = set()
        self.name = drafter.name
        self.max_nodes = max_nodes

    def connect(self, events: LinkEvents) -> None:
        """Ready at once."""
        self._events = events
        events.ready()

    def send(self, message: DrafterMessage) -> None:
        """Run the drafter and report before returning."""
        events = self._events
        assert events is not None, "send before connect"
        try:
            proposals = self._run(message)
        except Exception as error:
            logger.warning("drafter=%s event=raised", self.name, exc_info=True)
            events.failed(DrafterError(f"drafter {self.name}: {error}"))
            return
        events.answered(proposals)

    def _run(self, message: DrafterMessage) -> list[Proposal]:
        drafter = self._drafter
        for request_id in message.closes:
            drafter.close(request_id)
            self._open_ids.discard(request_id)
        for request in message.opens:
            drafter.open(request)
            self._open_ids.add(request.request_id)
        if message.commits:
            drafter.observe(message.commits)
        if not message.queries:
            return []
        return drafter.propose(message.queries, message.deadline)

    def disconnect(self) -> None:
        """Close every request, so that `ready` can promise a drafter that knows none."""
        self._events = None
        for request_id in self._open_ids:
            try:
                self._drafter.close(request_id)
            except Exception:
                logger.warning("drafter=%s event=close_raised", self.name, exc_info=True)
        self._open_ids.clear()

    async def close(self) -> None:
        """Close every request."""
        self.disconnect()
