"""A link to a drafter in the coordinator's own process: plain calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from ...core.errors import DrafterError
from ...core.interfaces import Drafter, OwningDrafter
from .failure_log import failure_reason
from .link import MAX_NODES, DrafterMessage, LinkEvents, is_report_due
from .session import DrafterSession

logger = logging.getLogger(__name__)


class InprocLink:
    """Calls a drafter directly. What the drafter raises becomes `failed`."""

    __slots__ = ("_drafter", "_events", "_session", "max_nodes", "name")

    is_local = True

    def __init__(self, drafter: Drafter, max_nodes: int = MAX_NODES) -> None:
        self._drafter = drafter
        self._session = DrafterSession(drafter)
        self._events: LinkEvents | None = None
        self.name = drafter.name
        self.max_nodes = max_nodes

    @property
    def learning_counts(self) -> Mapping[str, int]:
        """Learning counts of the drafter; see `LearningDrafter`."""
        return self._session.learning_counts

    def connect(self, events: LinkEvents) -> None:
        """Ready at once."""
        self._events = events
        events.ready()

    def send(self, message: DrafterMessage) -> None:
        """Run the drafter and report before returning."""
        events = self._events
        assert events is not None, "send before connect"
        try:
            proposals = self._session.run(message)
            told = self._session.report() if is_report_due(message) else None
        except Exception as error:
            # The hub logs what `failed` tells it, and counts what comes again.
            logger.debug("drafter=%s event=raised", self.name, exc_info=True)
            events.failed(DrafterError(f"it raised {failure_reason(error)}"))
            return
        events.answered(proposals, told)

    def unanswered(self) -> None:
        """Never: `send` answers before it returns."""

    def disconnect(self) -> None:
        """Close every request, so that `ready` can promise a drafter that knows none."""
        self._events = None
        self._session.close()

    async def close(self) -> None:
        """Close every request, and free what the drafter holds."""
        self.disconnect()
        if isinstance(self._drafter, OwningDrafter):
            await asyncio.to_thread(self._drafter.free)
