"""Keeps a fault of one request from the others, and the content of requests out of the log."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import PurePath
from types import TracebackType

from .errors import DraftlineError, RequestFailed, StageLost

logger = logging.getLogger(__name__)

# Frames of a traceback that are named, the innermost ones.
MAX_PLACES = 4


class Contained:
    """A context manager: an exception within it ends one request by `fail(error)`, and no more.

    `StageLost` is let through: it is no request's fault.
    """

    __slots__ = ("_fail", "_request_id")

    def __init__(self, request_id: str, fail: Callable[[DraftlineError], None]) -> None:
        self._request_id = request_id
        self._fail = fail

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, StageLost):
            return False
        self._fail(as_request_failure(error, self._request_id))
        return True


def as_request_failure(error: Exception, request_id: str) -> DraftlineError:
    """The error that a request's owner gets; an unforeseen one is logged by its place alone."""
    if isinstance(error, DraftlineError):
        return error
    logger.error("event=request_failed request_id=%s error=%s", request_id, place_of(error))
    return RequestFailed(
        f"an internal error ({type(error).__name__}) ended this request; see the server's log"
    )


def place_of(error: BaseException) -> str:
    """The kind of an error and where it was raised, without its message.

    A message may quote what a request holds: `KeyError at core/engine.py:120 _commit < ...`.
    """
    places = place_in(traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__} at {places or 'an unknown place'}"


def place_in(stack: traceback.StackSummary) -> str:
    """The innermost functions of a stack, the innermost first."""
    return " < ".join(
        f"{'/'.join(PurePath(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}"
        for frame in reversed(stack[-MAX_PLACES:])
    )
