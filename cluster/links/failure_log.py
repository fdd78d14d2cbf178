"""Failures that come again and again, in few lines of a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import PurePath

from ...core.errors import DraftlineError

PERIOD_S = 30.0


class FailureLog:
    """One line an event in `period_s` seconds; those between are counted and told in the next.

    clock  seconds; only differences count
    """

    def __init__(
        self,
        logger: logging.Logger,
        subject: str,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._subject = subject
        self._period_s = period_s
        self._clock = clock
        # By event: when the next line may be written, and how many were left out.
        self._events: dict[str, tuple[float, int]] = {}

    def log(self, event: str, reason: str) -> None:
        """Say that it happened, or count it."""
        now = self._clock()
        next_at, num_left_out = self._events.get(event, (now, 0))
        if now < next_at:
            self._events[event] = (next_at, num_left_out + 1)
            return
        self._events[event] = (now + self._period_s, 0)
        repeats = f" left_out={num_left_out}" if num_left_out else ""
        self._logger.warning("%s event=%s%s %s", self._subject, event, repeats, reason)


def failure_reason(error: BaseException) -> str:
    """What failed and where, without the words of errors that are not draftline's own.

    Those may hold what a request said.
    """
    if isinstance(error, DraftlineError):
        return str(error)
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return type(error).__name__
    code = place.tb_frame.f_code
    file = "/".join(PurePath(code.co_filename).parts[-2:])
    return f"{type(error).__name__} in {code.co_name} at {file}:{place.tb_lineno}"
