"""Links between neighbouring stages, over a group that keeps what is sent."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
from draftline.cluster.transport.hidden_link import Backend, HiddenLink, SideStream
from draftline.core.errors import StageLost

CPU = torch.device("cpu")
SOON = timedelta(milliseconds=20)


@dataclass
class FakeWork:
    """One send or receive; one that is lost fails, one that is late never ends."""

    group: FakeGroup

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        if self.group.is_lost or self.group.is_late:
            raise RuntimeError("connection closed by peer" if self.group.is_lost else "timed out")
        self.group.waited += 1

    def is_completed(self) -> bool:
        return not self.group.is_late


@dataclass
class FakeGroup:
    """What neighbours send one another, by receiver."""

    index: int
    sent: dict[int, deque[torch.Tensor]]
    is_lost: bool = False
    is_late: bool = False
    hangs: threading.Event | None = None
    waited: int = 0
    begun: int = 0

    def send(self, tensors: list[torch.Tensor], receiver: int, tag: int) -> FakeWork:
        assert receiver == self.index + 1
        self.begun += 1
        if self.hangs is not None:
            self.hangs.wait()
        self.sent[receiver] += tensors
        return FakeWork(self)

    def recv(self, tensors: list[torch.Tensor], sender: int, tag: int) -> FakeWork:
        assert sender == self.index - 1
        tensors[0].copy_(self.sent[self.index].popleft())
        return FakeWork(self)


@dataclass
class Row:
    """Stages in a row."""

    num_stages: int = 3
    backend: Backend = "gloo"
    sent: dict[int, deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))

    def __post_init__(self) -> None:
        self.groups = [FakeGroup(index, self.sent) for index in range(self.num_stages)]
        self.links = [
            HiddenLink(group, index, self.num_stages, CPU, self.backend)
            for index, group in enumerate(self.groups)
        ]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_steps_of_all_kinds_follow_one_another(backend: Backend) -> None:
    row = Row(backend=backend)
    for link in row.links:
        link.try_out(timedelta(seconds=10))
    first, second, _ = row.links
    spans = ((1.5, 2.5),)
    steps = [(torch.randn(3, 4), ()), (torch.randn(1, 4), spans), (torch.randn(0, 4), ())]
    for hidden, own_spans in steps:
        first.send(hidden, own_spans, max_under_way=2)
    for hidden, own_spans in steps:
        found, found_spans = second.receive(len(hidden), 4, torch.float32, len(own_spans))
        torch.testing.assert_close(found, hidden, rtol=0, atol=0)
        assert found_spans == own_spans
    assert not any(row.sent.values())


def test_hidden_states_are_received_beside_the_current_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And waited for, and used, by the current one: NCCL orders what it does by these."""
    row = Row(backend="nccl")
    heard: list[str] = []

    @contextmanager
    def beside(_stream: SideStream) -> Iterator[None]:
        heard.append("beside")
        yield
        heard.append("back")

    def noting(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def note(*args: object, **kwargs: object) -> object:
            heard.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, note)

    monkeypatch.setattr(SideStream, "beside", beside)
    for owner, name in ((FakeGroup, "recv"), (FakeWork, "wait"), (SideStream, "hand_over")):
        noting(owner, name)
    row.links[0].send(torch.ones(2, 4), (), max_under_way=2)
    row.links[1].receive(2, 4, torch.float32, 0)
    assert heard == ["beside", "back", "beside", "recv", "back", "wait", "hand_over"]


def test_neighbours_meet_in_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs that begin with an even stage at once, then the others."""
    row = Row(num_stages=5)
    heard: list[tuple[int, str]] = []

    def trial(
        link: HiddenLink, begin: Callable[[], FakeWork], neighbour: int, timeout: timedelta
    ) -> None:
        assert timeout == SOON
        heard.append((link._index, "behind" if neighbour > link._index else "before"))

    monkeypatch.setattr(HiddenLink, "_try", trial)
    for link in row.links:
        link.try_out(SOON)
    assert heard == [
        (0, "behind"), (1, "before"), (1, "behind"), (2, "behind"), (2, "before"),
        (3, "before"), (3, "behind"), (4, "before"),
    ]  # fmt: skip


def test_what_is_sent_is_held_until_it_must_have_arrived() -> None:
    row = Row(num_stages=2)
    group, link = row.groups[0], row.links[0]
    for begun in range(1, 6):
        link.send(torch.ones(2, 4), (), max_under_way=3)
        assert group.waited == max(0, begun - 3)


def test_a_neighbour_that_is_gone() -> None:
    row = Row(num_stages=2)
    row.groups[1].is_lost = row.groups[0].is_lost = True
    row.links[0].send(torch.ones(1, 4), (), max_under_way=1)
    with pytest.raises(StageLost, match="stage 1 is out of reach of stage 0"):
        row.links[0].send(torch.ones(1, 4), (), max_under_way=1)
    with pytest.raises(StageLost, match="stage 0 is out of reach of stage 1"):
        row.links[1].receive(1, 4, torch.float32, 0)


@pytest.mark.parametrize(
    ("backend", "told"),
    [("gloo", "by gloo: timed out$"), ("nccl", "by nccl: nothing came within .*NCCL_DEBUG=INFO")],
)
def test_a_neighbour_that_never_answers_the_trial(backend: Backend, told: str) -> None:
    row = Row(backend=backend)
    row.groups[0].is_late = True
    with pytest.raises(StageLost, match=f"stage 0 does not reach stage 1 {told}"):
        row.links[0].try_out(SOON)


def test_a_neighbour_that_connecting_waits_for_without_end() -> None:
    """As NCCL does, which connects before it gives anything to wait for."""
    row = Row(backend="nccl")
    row.groups[1].hangs = threading.Event()
    row.sent[1].append(torch.zeros(1))
    with pytest.raises(StageLost, match=r"stage 1 does not reach stage 2 by nccl: nothing came"):
        row.links[1].try_out(SOON)
    row.groups[1].hangs.set()
