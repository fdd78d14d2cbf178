"""All errors that draftline raises on purpose, the checks that raise them, and what is logged.

A message says what is wrong and how to mend it; `field` names the offending input, where there
is one. The HTTP status that each class maps to is decided in `deploy/`.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Iterable
from pathlib import PurePath
from types import TracebackType
from typing import TypeGuard, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Frames of a traceback that are named, the innermost ones.
MAX_PLACES = 4
MAX_INT32 = 2**31 - 1
# Most characters of a client's own input that an error repeats.
MAX_SHOWN = 80
MAX_SHOWN_INT = 10**40


class DraftlineError(Exception):
    """Base of every error below."""


class FieldError(DraftlineError):
    """A user's input is wrong; `field` is its dotted name, such as `sampling.top_p`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[FieldError], tuple[str, str]]:
        return type(self), (self.field, self.message)


class ConfigError(FieldError):
    """A setting given at start is wrong."""


class RequestError(FieldError):
    """A request's parameter is wrong; no retry can help."""


class CheckpointError(DraftlineError):
    """A model folder is missing, incomplete, corrupt or of an unsupported kind."""


class UnsupportedModel(CheckpointError):
    """Stages cannot run a kind of models."""

    def __init__(self, kind: str, why: str) -> None:
        """`kind`: its `model_type`."""
        super().__init__(f"model_type {kind!r} is not supported: {why}")


class StoreError(DraftlineError):
    """A retrieval store is out of reach; or a segment is corrupt, or of another model."""


class DamagedError(StoreError):
    """What a store keeps under one name is damaged; the store itself answers."""


class CapacityError(DraftlineError):
    """Queues or memory are full now; the same request may succeed later.

    `retry_after_s`, where it is known, says when.
    """

    retry_after_s: int | None = None


class ReaderTooSlow(DraftlineError):
    """A stream's reader takes its deltas so slowly that they pile up; the request ends."""


class ProtocolError(DraftlineError):
    """A message from another process breaks the contract between the parts."""


class DrafterError(DraftlineError):
    """A drafter failed or is out of reach. Costs speed only, never a request."""


class StageError(DraftlineError):
    """A stage failed on one step; the requests of that step end, the pipeline goes on."""


class StageLost(DraftlineError):
    """A pipeline stage died or hangs; the replica recovers and its requests go on."""


class RequestSuspected(StageLost):
    """Stages were lost again and again with one request, which is not to be tried again."""

    @classmethod
    def after(cls, num_losses: int) -> RequestSuspected:
        """The error after so many losses."""
        return cls(f"the model's stages were lost {num_losses} times with this request")


class EngineFailed(DraftlineError):
    """The engine cannot go on; its process must be replaced."""


class RequestFailed(DraftlineError):
    """A fault of draftline's own ended one request; the others go on."""


class NotFinite(RequestFailed):
    """The target's logits after a request's text are NaN or infinite; the request ends."""

    def __init__(self, message: str = "the model's logits for this request are not finite") -> None:
        super().__init__(message)


class DeviceLost(StageLost):
    """A stage's device failed for good; its process must end, and a new one take its place.

    A pipeline whose stages have processes of their own replaces that one. Where the stages run in
    the engine's own process (`LocalPipeline`), nothing but the end of that process helps.
    """


class EngineClosed(DraftlineError):
    """The engine was closed; the same request may succeed with another one."""


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


class BestEffort:
    """A context manager: an exception within it costs speed, and no request.

    For what only makes steps faster: what is drafted, and what is learned of it. Each place that
    raises is logged once.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: set[str] = set()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        place = place_of(error)
        if place not in self._known:
            self._known.add(place)
            logger.error("event=slowed error=%s", place)
        return True


def contain_each(
    work: Callable[[T], None], parts: Iterable[T], fail: Callable[[T, Exception], None]
) -> None:
    """Do something for each part; an exception ends that part's request by `fail`, and no more.

    `StageLost` is let through. For parts of every step: `Contained` takes a microsecond for each.
    """
    for part in parts:
        try:
            work(part)
        except StageLost:
            raise
        except Exception as error:  # noqa: BLE001 - it supervises: the other requests go on
            fail(part, error)


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


def require(condition: bool, field: str, message: str) -> None:
    """Raise `RequestError` unless the condition holds."""
    if not condition:
        raise RequestError(field, message)


def is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_id(value: object) -> bool:
    """Whether a vocabulary could have it."""
    return is_whole(value) and 0 <= value <= MAX_INT32


def are_token_ids(value: object) -> bool:
    """Whether it is a tuple of token ids."""
    return isinstance(value, tuple) and all(is_token_id(item) for item in value)


def shortened(value: object) -> str:
    """A client's value as errors show it: the beginning of its `repr`, or its type's name."""
    if isinstance(value, str):
        # The repr of all of it would take as long as it is.
        return repr(value) if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]!r}..."
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return (
            str(value) if abs(value) < MAX_SHOWN_INT else f"a number of {value.bit_length()} bits"
        )
    return f"a {type(value).__name__}"
