"""What is sent to a drafter of another process, what comes back, and the way there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...core.errors import DrafterError
from ...core.interfaces import PrefixCounts
from ...core.proposals import Commit, DraftRequest, FeatureRows, Proposal, Query

# Every so many answers carry a report.
REPORT_EVERY = 32
# Of a link that is given no limit of its own: that of the settings.
MAX_NODES = 256


@dataclass(frozen=True, slots=True, eq=False)
class DrafterMessage:
    """Everything for one drafter since the last message.

    The drafter observes the `last_commits` of the requests that end, then acts in the order of the
    fields.

    deadline  seconds of the hub's clock; proposals after it are late but not lost
    features  of the requests that are asked for; observed before the commits. A link cuts
              from what is handed out what its drafter reads
    """

    sequence: int
    closes: tuple[str, ...]
    opens: tuple[DraftRequest, ...]
    commits: Sequence[Commit]
    queries: Sequence[Query]
    deadline: float
    last_commits: Sequence[Commit] = ()
    features: Sequence[FeatureRows] = ()


@dataclass(frozen=True, slots=True, eq=False)
class DrafterReport:
    """A drafter's report about itself.

    memory_bytes  what it takes
    learning      what it learned, see `core.interfaces.LearningDrafter`
    prefix        what its cache had of new texts, see `core.interfaces.CachingDrafter`
    """

    memory_bytes: int = 0
    learning: Mapping[str, int] = field(default_factory=dict)
    prefix: PrefixCounts = field(default_factory=PrefixCounts)


@dataclass(frozen=True, slots=True)
class DraftSeconds:
    """Seconds that a drafter worked, by kind of call; closing counts as opening."""

    open_s: float = 0.0
    observe_s: float = 0.0
    propose_s: float = 0.0

    def __add__(self, other: DraftSeconds) -> DraftSeconds:
        return DraftSeconds(
            self.open_s + other.open_s,
            self.observe_s + other.observe_s,
            self.propose_s + other.propose_s,
        )


def is_report_due(message: DrafterMessage) -> bool:
    """Whether the answer to this message carries a report: the first one does."""
    return message.sequence % REPORT_EVERY == 1


class LinkEvents(Protocol):
    """What a link reports. Calls come in the loop that the link was made in."""

    def ready(self) -> None:
        """Messages may be sent now; the drafter knows no request."""
        ...

    def answered(
        self,
        proposals: Sequence[Proposal],
        report: DrafterReport | None = None,
        seconds: DraftSeconds | None = None,
    ) -> None:
        """The answer to the last message: one proposal a query, in order.

        report, seconds  None where the answer carries none
        """
        ...

    def failed(self, error: DrafterError) -> None:
        """The last message, or the connection, is lost; the drafter's state is unknown."""
        ...

    def server_load(self, num_others: int, *, is_draining: bool) -> None:
        """The server's load; before each `answered`, where there is a server.

        num_others   requests that other coordinators have open there
        is_draining  it will stop soon; it answers still
        """
        ...


class DrafterLink(Protocol):
    """The way to one drafter of another process. Carries one message at a time."""

    @property
    def name(self) -> str:
        """The `source` of the drafter's proposals."""
        ...

    @property
    def max_nodes(self) -> int:
        """Most nodes that it is asked for, for one request and step."""
        ...

    @property
    def keeps_answers(self) -> bool:
        """Whether it learns from requests that end, also where it was never asked for them."""
        ...

    @property
    def reads_features(self) -> bool:
        """Whether it goes on from the target's features (`core.interfaces.FeatureDrafter`)."""
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
