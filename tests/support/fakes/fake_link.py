"""A remote link whose every event the test decides, and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Sequence

from draftline.cluster.links.link import DrafterMessage, LinkEvents
from draftline.core.errors import DrafterError
from draftline.core.interfaces import Drafter
from draftline.core.proposals import Proposal


class FakeClock:
    """Seconds; moved by the test only."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeLink:
    """Keeps what is sent; `answer` runs the drafter on the oldest message, `lose` drops all."""

    max_nodes = 256
    keeps_answers = True
    reads_features = False

    def __init__(self, drafter: Drafter) -> None:
        self.name = drafter.name
        self.drafter = drafter
        self.sent: list[DrafterMessage] = []
        self.waiting: DrafterMessage | None = None
        self.num_connects = self.num_unanswered = 0
        self.is_reachable = True
        self.events: LinkEvents | None = None

    def connect(self, events: LinkEvents) -> None:
        self.num_connects += 1
        self.events = events
        if self.is_reachable:
            events.ready()
        else:
            events.failed(DrafterError("not reachable"))

    def send(self, message: DrafterMessage) -> None:
        assert self.waiting is None, "a second message before the answer"
        self.sent.append(message)
        self.waiting = message

    def unanswered(self) -> None:
        self.num_unanswered += 1

    def disconnect(self) -> None:
        self.waiting = None

    async def sent_one(self) -> bool:
        """Whether a message waits for its answer."""
        return self.waiting is not None

    async def close(self) -> None:
        self.disconnect()

    def answer(self, proposals: Sequence[Proposal] | None = None) -> None:
        """Answer the waiting message as the drafter does, or with `proposals`."""
        message, self.waiting = self.waiting, None
        assert message is not None
        assert self.events is not None
        self.drafter.observe(message.last_commits)
        for request_id in message.closes:
            self.drafter.close(request_id)
        for request in message.opens:
            self.drafter.open(request)
        self.drafter.observe(message.commits)
        own = self.drafter.propose(message.queries)
        self.events.answered(own if proposals is None else proposals)

    def lose(self) -> None:
        """The connection breaks."""
        assert self.events is not None
        self.events.failed(DrafterError("lost"))
