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
    """Queues or memory are full now; the same request may succeed later."""


class ProtocolError(DraftlineError):
    """A message from another process breaks the contract between the parts."""


class DrafterError(DraftlineError):
    """A drafter failed or is out of reach. Costs speed only, never a request."""


class StageError(DraftlineError):
    """A stage failed on one step; the requests of that step end, the pipeline goes on."""


class StageLost(DraftlineError):
    """A pipeline stage died or hangs; the replica recovers and its requests go on."""


class EngineFailed(DraftlineError):
    """The engine cannot go on; its process must be replaced."""


class RequestFailed(DraftlineError):
    """A fault of draftline's own ended one request; the others go on."""


class DeviceLost(StageLost):
    """A stage's device failed for good; its process must end, and a new one take its place.

    A pipeline whose stages have processes of their own replaces that one. Where the stages run in
    the engine's own process (`LocalPipeline`), nothing but the end of that process helps.
    """


class EngineClosed(DraftlineError):
    """The engine was closed; the same request may succeed with another one."""
