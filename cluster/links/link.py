"""What the drafter hub sends to a drafter, and the way there: in process or over gRPC."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from ...core.errors import DrafterError
from ...core.interfaces import (
    AheadDrafter,
    CachingDrafter,
    Drafter,
    FeatureDrafter,
    LearningDrafter,
    OwningDrafter,
    PrefixCounts,
)
from ...core.proposals import (
    Commit,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    Proposal,
    Query,
)
from .failures import FailureLog, failure_reason
from .features import feature_columns

# Every so many answers carry a report.
REPORT_EVERY = 32
# Of a link that is given no limit of its own: that of the settings.
MAX_NODES = 256
logger = logging.getLogger(__name__)
NamedT = TypeVar("NamedT", Commit, Query, FeatureRows)


@dataclass(frozen=True, slots=True, eq=False)
class DrafterMessage:
    """Everything for one drafter since the last message.

    It hears of the `last_commits` of the requests that end, and then acts in the order of the
    fields.

    deadline  seconds of the hub's clock; proposals after it are late but not lost
    features  of the requests that are asked for; it hears of them before the commits. A link cuts
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
    """What a drafter tells of itself.

    memory_bytes  what it takes
    learning      what it learned, see `core.interfaces.LearningDrafter`
    prefix        what its cache had of new texts, see `core.interfaces.CachingDrafter`
    """

    memory_bytes: int = 0
    learning: Mapping[str, int] = field(default_factory=dict)
    prefix: PrefixCounts = field(default_factory=PrefixCounts)


@dataclass(frozen=True, slots=True)
class DraftSeconds:
    """Seconds that a drafter worked, by what it was told to do; closing counts as opening."""

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

    def told(self, num_others: int, *, is_draining: bool) -> None:
        """What the server says of itself; before each `answered`, where there is a server.

        num_others   requests that other coordinators have open there
        is_draining  it will stop soon; it answers still
        """
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

    @property
    def keeps_answers(self) -> bool:
        """Whether it learns from requests that end, also where it was never asked for them."""
        ...

    @property
    def reads_features(self) -> bool:
        """Whether it goes on from the target's features (`core.interfaces.FeatureDrafter`)."""
        ...

    @property
    def ahead(self) -> AheadDrafter | None:
        """The drafter, if it stands for a head of the last stage."""
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


def features_read(drafter: Drafter) -> FeatureLayers | None:
    """What a drafter reads of the target's states; None: nothing."""
    return drafter.feature_layers if isinstance(drafter, FeatureDrafter) else None


class DrafterSession:
    """One coordinator's requests at a drafter; `prefix` keeps their ids apart from others'."""

    __slots__ = ("_drafter", "_failures", "_open_ids", "_prefix", "clock")

    def __init__(self, drafter: Drafter, prefix: str = "") -> None:
        self._drafter = drafter
        # Seconds, for how long the drafter works.
        self.clock: Callable[[], float] = time.perf_counter
        self._prefix = prefix
        self._failures = FailureLog(logger, f"drafter={drafter.name}")
        self._open_ids: set[str] = set()

    @property
    def num_open(self) -> int:
        """Requests that are open."""
        return len(self._open_ids)

    @property
    def learning_counts(self) -> Mapping[str, int]:
        """What the drafter learned, from all coordinators together; empty where it never does."""
        drafter = self._drafter
        return drafter.learning_counts if isinstance(drafter, LearningDrafter) else {}

    def report(self) -> DrafterReport:
        """Memory, learning and cache of the drafter, for all coordinators together.

        Raises what the drafter raises.
        """
        drafter = self._drafter
        prefix = drafter.prefix_counts if isinstance(drafter, CachingDrafter) else PrefixCounts()
        return DrafterReport(drafter.memory_bytes, self.learning_counts, prefix)

    def run(self, message: DrafterMessage) -> tuple[Sequence[Proposal], DraftSeconds]:
        """Do what one message says; also how long that took. Raises what the drafter raises."""
        drafter, clock = self._drafter, self.clock
        start = clock()
        if message.last_commits:
            drafter.observe([self._named(commit) for commit in message.last_commits])
        for request_id in message.closes:
            drafter.close(self._prefix + request_id)
            self._open_ids.discard(self._prefix + request_id)
        for request in message.opens:
            request_id = self._prefix + request.request_id
            self._open_ids.add(request_id)
            drafter.open(replace(request, request_id=request_id) if self._prefix else request)
        opened = clock()
        if message.features and isinstance(drafter, FeatureDrafter):
            drafter.observe_features([self._named(rows) for rows in message.features])
        if message.commits:
            drafter.observe([self._named(commit) for commit in message.commits])
        observed = clock()
        queries = [self._named(query) for query in message.queries]
        proposals = drafter.propose(queries, message.deadline) if queries else []
        return proposals, DraftSeconds(opened - start, observed - opened, clock() - observed)

    def close(self) -> None:
        """Close every request. What the drafter raises is logged: it is given up anyway."""
        for request_id in self._open_ids:
            try:
                self._drafter.close(request_id)
            except Exception as error:
                logger.debug("drafter=%s event=close_raised", self._drafter.name, exc_info=True)
                self._failures.log("close_raised", failure_reason(error))
        self._open_ids.clear()

    def _named(self, part: NamedT) -> NamedT:
        return part._replace(request_id=self._prefix + part.request_id) if self._prefix else part


class InprocLink:
    """Calls a drafter directly. What the drafter raises becomes `failed`.

    features  what the target hands out, for one that reads some of it; by default just that
    """

    __slots__ = (
        "_columns", "_events", "ahead", "drafter", "keeps_answers", "max_nodes", "name",
        "reads_features", "session",
    )  # fmt: skip

    is_local = True

    def __init__(
        self,
        drafter: Drafter,
        max_nodes: int = MAX_NODES,
        *,
        keeps_answers: bool = True,
        features: FeatureLayers | None = None,
    ) -> None:
        read = features_read(drafter)
        self._columns = None if read is None else feature_columns(features or read, read)
        self.drafter = drafter
        self.session = DrafterSession(drafter)
        self._events: LinkEvents | None = None
        self.name = drafter.name
        self.max_nodes = max_nodes
        self.keeps_answers = keeps_answers
        self.reads_features = read is not None
        self.ahead = drafter if isinstance(drafter, AheadDrafter) else None

    @property
    def learning_counts(self) -> Mapping[str, int]:
        """Learning counts of the drafter; see `LearningDrafter`."""
        return self.session.learning_counts

    def connect(self, events: LinkEvents) -> None:
        """Report `ready` at once."""
        self._events = events
        events.ready()

    def send(self, message: DrafterMessage) -> None:
        """Run the drafter and report before returning."""
        events = self._events
        assert events is not None, "send before connect"
        if message.features and self._columns is not None:
            own = [self._columns.of(rows) for rows in message.features]
            message = replace(message, features=own)
        try:
            proposals, seconds = self.session.run(message)
            report = self.session.report() if is_report_due(message) else None
        except Exception as error:
            # The hub logs what `failed` tells it, and counts what comes again.
            logger.debug("drafter=%s event=raised", self.name, exc_info=True)
            events.failed(DrafterError(f"it raised {failure_reason(error)}"))
            return
        events.answered(proposals, report, seconds)

    def unanswered(self) -> None:
        """Does not happen: `send` answers before it returns."""

    def disconnect(self) -> None:
        """Close every request, so that `ready` can promise a drafter that knows none."""
        self._events = None
        self.session.close()

    async def close(self) -> None:
        """Close every request, and free what the drafter holds."""
        self.disconnect()
        if isinstance(self.drafter, OwningDrafter):
            await asyncio.to_thread(self.drafter.free)
