"""What a stage hands on, once it is there: in order, and beside the stage where that helps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ...core.errors import StageLost

Delivery = Callable[[], None]


class Deliveries:
    """Does one delivery after the other.

    apart  in a thread of its own: a stage whose device computes by itself launches its next step
           while the last one's results are on their way. Otherwise at once, which is faster where
           there is nothing to wait for.

    In that thread `on_end` hears of a neighbour or a coordinator that is gone, once; what is left
    then is dropped. Without the thread, `add` raises instead.
    """

    def __init__(self, on_end: Callable[[Exception], None], *, apart: bool) -> None:
        self._on_end = on_end
        self._waiting: queue.SimpleQueue[Delivery | None] | None = None
        if apart:
            self._waiting = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def add(self, delivery: Delivery) -> None:
        """Do it now, or when those before it are done."""
        if self._waiting is None:
            delivery()
        else:
            self._waiting.put(delivery)

    def close(self) -> None:
        """Wait for what was added; nothing may be added any more."""
        if self._waiting is not None:
            self._waiting.put(None)
            self._thread.join()

    def _work(self) -> None:
        assert self._waiting is not None
        while (delivery := self._waiting.get()) is not None:
            try:
                delivery()
            except (StageLost, ConnectionError) as error:
                self._on_end(error)
                return
