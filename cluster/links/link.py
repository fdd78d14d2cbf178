"""What the drafter hub sends to a drafter, and the way there: in process or over gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...core.errors import DrafterError
from ...core.proposals import Commit, DraftRequest, Proposal, Query

# Every so many answers carry a report.
REPORT_EVERY = 32
# Of a link that is given no limit of its own: that of the settings.
MAX_NODES = 256


@dataclass(frozen=True, slots=True, eq=False)
class DrafterMessage:
    """Everything for one drafter since the last message.

    It hears of the `last_commits` of the requests that end, and then acts in the order of the
    fields.

    deadline  seconds of the hub's clock; proposals after it are late but not lost
    """

    sequence: int
    closes: tuple[str, ...]
    opens: tuple[DraftRequest, ...]
    commits: Sequence[Commit]
    queries: Sequence[Query]
    deadline: float
    last_commits: Sequence[Commit] = ()


@dataclass(frozen=True, slots=True, eq=False)
class DrafterReport:
    """What a drafter tells of itself.

    memory_bytes  what it takes
    learning      what it learned, see `core.interfaces.LearningDrafter`
    """

    memory_bytes: int = 0
    learning: Mapping[str, int] = field(default_factory=dict)


def is_report_due(message: DrafterMessage) -> bool:
    """Whether the answer to this message carries a report: the first one does."""
    return message.sequence % REPORT_EVERY == 1


class LinkEvents(Protocol):
    """What a link reports. Calls come in the loop that the link was made in."""

    def ready(self) -> None:
        """Messages may be sent now; the drafter knows no request."""
        ...

    def answered(self, proposals: Sequence[Proposal], report: DrafterReport | None = None) -> None:
        """The answer to the last message: one proposal a query, in order.

        report  None where the answer carries none
        """
        ...

    def failed(self, error: DrafterError) -> None:
        """The last message, or the connection, is lost; the drafter's state is unknown."""
        ...


class DrafterLink(Protocol):
    """The way to one drafter. Carries one message at a time."""

    @property
    def name(self) -> str:
        """The `source` of the drafter's proposals."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether `send` reports the answer before it returns."""
        ...

    @property
    def learning_counts(self) -> Mapping[str, int] | None:
        """What the drafter learned up to now; None where only its reports tell."""
        ...

    @property
    def max_nodes(self) -> int:
        """Most nodes that it is asked for, for one request and step."""
        ...

    def connect(self, events: LinkEvents) -> None:
        """Begin to connect; `ready` or `failed` follows."""
        ...

    def send(self, message: DrafterMessage) -> None:
        """Send after `ready` and after the former answer; `answered` or `failed` follows."""
        ...

    def unanswered(self) -> None:
        """The last message got no answer in time; `disconnect` follows.

        A link whose server was started here replaces one that keeps silent.
        """
        ...

    def disconnect(self) -> None:
        """Drop the connection; no event of it follows. `connect` may be called again."""
        ...

    async def close(self) -> None:
        """Disconnect and free everything."""
        ...
