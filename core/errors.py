"""All errors that draftline raises on purpose, in one tree.

A message says what is wrong and how to mend it; `field` names the offending input, where there
is one. The HTTP status that each class maps to is decided in `deploy/`.
"""

from __future__ import annotations


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


class StoreError(DraftlineError):
    """A retrieval store is out of reach; or a segment is corrupt, or of another model."""


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
    """A pipeline stage died; its requests end, the replica recovers."""


class EngineClosed(DraftlineError):
    """The engine was closed; the same request may succeed with another one."""
