"""The engine's thread: what hangs is noticed, what dies is told, nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError

import numpy as np
import pytest
from draftline.cluster.engine import engine_thread
from draftline.cluster.engine.engine_thread import EngineThread, Watchdog
from draftline.core.errors import (
    DeviceLost,
    DraftlineError,
    EngineClosed,
    EngineFailed,
    RequestError,
    StageLost,
)
from draftline.core.request.output import Delta
from draftline.core.request.request import Request
from draftline.core.request.sampling_params import SamplingParams
from draftline.core.request.stop import StopRule
from draftline.core.step.in_flight import StepDeadline
from draftline.core.steps import StepInput, StepOutput
from support.fakes.fake_bench import Bench, NoText
from support.fakes.fake_target import FakeTarget, plain_answer

VOCAB = 7
LONG = 1000


class Target(FakeTarget):
    """Blocks its thread, or raises, when told so."""

    def __init__(self) -> None:
        super().__init__(VOCAB, 4)
        self.gate = threading.Event()
        self.gate.set()
        self.blocked = threading.Event()
        self.error: BaseException | None = None

    def submit(self, step: StepInput) -> asyncio.Future[StepOutput]:
        if not self.gate.is_set():
            self.blocked.set()
            self.gate.wait(20)
        if self.error is not None:
            future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
            future.set_exception(self.error)
            return future
        return super().submit(step)


class Parts:
    """An engine over fakes; `recovering` runs in place of a recovery."""

    def __init__(self) -> None:
        self.bench = Bench(num_blocks=4000, nodes=0)
        self.target = Target()
        self.bench.use_target(self.target)
        self.core = self.bench.core
        self.recovering: Callable[[], object] = lambda: None
        self.num_recoveries = 0
        self.replaced: Sequence[int] = (0,)
        self.stopped = False

    async def start(self) -> None:
        pass

    async def recover(self) -> Sequence[int]:
        self.num_recoveries += 1
        result = self.recovering()
        if asyncio.iscoroutine(result):
            await result
        self.target.error = None
        self.core.use_pipeline(FakeTarget(VOCAB, 4))
        return self.replaced

    async def stop(self) -> None:
        self.stopped = True


class Running:
    """A started thread, and what its requests heard."""

    def __init__(self, **settings: object) -> None:
        self.parts = Parts()
        self.failures: list[str] = []
        self.heard: dict[str, list[Delta | DraftlineError]] = {}
        self.ended: dict[str, threading.Event] = {}

        async def build() -> Parts:
            return self.parts

        self.thread = EngineThread(build, on_failure=self.failures.append, **settings)  # type: ignore[arg-type]
        self.thread.start()

    def add(self, name: str, max_tokens: int = 20, *, enqueued: bool = False) -> None:
        heard, ended = (
            self.heard.setdefault(name, []),
            self.ended.setdefault(name, threading.Event()),
        )

        refusals: list[DraftlineError] = []

        def sink(event: Delta | DraftlineError) -> None:
            heard.append(event)
            if isinstance(event, DraftlineError):
                refusals.append(event)
            if isinstance(event, DraftlineError) or event.finish_reason:
                ended.set()

        params = SamplingParams(max_tokens=max_tokens)
        ids = np.array([1, 2, 3], dtype=np.int32)
        request = Request(name, ids, params, len(name), max_tokens, sink)
        self.thread.enqueue(request, StopRule(params, (), max_tokens, NoText()))
        if not enqueued:
            self.thread.take_enqueued()
            if refusals:
                raise refusals[0]

    def get_stuck(self, name: str, limit_s: float) -> None:
        """In a step of this request; the first steps compile loops, and are slow."""
        self.add(name, LONG)
        until(lambda: len(self.heard[name]) > 3)
        self.parts.core.deadline = StepDeadline(limit_s)
        # Steps that began before do not know of it.
        seen = len(self.heard[name])
        until(lambda: len(self.heard[name]) > seen + 3)
        self.parts.target.gate.clear()
        assert self.parts.target.blocked.wait(20)

    def last(self, name: str) -> Delta | DraftlineError:
        assert self.ended[name].wait(60)
        return self.heard[name][-1]

    def tokens(self, name: str) -> list[int]:
        return [
            t for event in self.heard[name] if isinstance(event, Delta) for t in event.token_ids
        ]


@pytest.fixture
def running() -> Iterator[Running]:
    found = Running()
    yield found
    found.parts.target.gate.set()
    found.thread.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_thread_that_is_stuck_in_a_step_fails_and_says_so(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "GRACE_S", 0.0)
    monkeypatch.setattr(engine_thread, "CLOSE_TIMEOUT_S", 0.05)
    assert running.thread.is_healthy
    running.get_stuck("a", limit_s=0.05)
    error = running.last("a")
    assert isinstance(error, EngineFailed)
    assert not running.thread.is_healthy
    assert running.thread.health == "failed"
    until(lambda: len(running.failures) == 1)
    assert "step_timeout_s" in running.failures[0]
    with pytest.raises(EngineFailed):
        running.add("b")
    began = time.monotonic()
    running.thread.close()
    assert time.monotonic() - began < 10
    assert running.thread.health == "failed"


def test_whoever_waits_while_the_thread_is_stuck_hears_of_it(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "GRACE_S", 0.0)
    running.get_stuck("a", limit_s=0.3)
    # The event loop cannot take this one any more.
    with pytest.raises(EngineFailed):
        running.add("b")


def test_requests_go_on_after_a_lost_stage_and_new_ones_are_refused_meanwhile(
    running: Running,
) -> None:
    release = asyncio.Event()
    running.parts.recovering = release.wait
    running.add("a", LONG)
    until(lambda: len(running.heard["a"]) > 3)
    running.parts.target.error = StageLost("stage 0 is dead")
    until(lambda: running.thread.health == "recovering")
    assert not running.thread.is_healthy
    with pytest.raises(StageLost, match="recovering"):
        running.add("b")
    running.thread._loop.call_soon_threadsafe(release.set)
    last = running.last("a")
    assert isinstance(last, Delta)
    assert running.tokens("a") == plain_answer([1, 2, 3], LONG, 1, VOCAB)
    assert running.thread.is_healthy
    running.add("b")
    assert isinstance(running.last("b"), Delta)


async def _never() -> None:
    await asyncio.Event().wait()


def _raise() -> None:
    raise RuntimeError("what a tenant wrote")


@pytest.mark.parametrize(
    ("recovering", "reason"),
    [(_never, "recovery_timeout_s"), (_raise, "RuntimeError at"), (None, "within an hour")],
)
def test_an_engine_that_does_not_come_back_fails(
    recovering: Callable[[], object] | None, reason: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    running = Running(recovery_timeout_s=0.05)
    if recovering is None:
        monkeypatch.setattr(engine_thread, "MAX_RECOVERIES_AN_HOUR", 0)
    else:
        running.parts.recovering = recovering
    running.add("a", LONG)
    running.parts.target.error = StageLost("stage 0 is dead")
    assert isinstance(running.last("a"), EngineFailed)
    until(lambda: running.failures != [])
    assert reason in running.failures[0]
    # Nothing else tells why.
    assert "stage 0 is dead" in caplog.text or recovering is _raise
    assert "tenant" not in caplog.text
    running.thread.close()
    assert running.parts.stopped


def test_recoveries_count_for_an_hour() -> None:
    now = [0.0]
    running = Running(clock=lambda: now[0])
    thread = running.thread
    for _ in range(3 * engine_thread.MAX_RECOVERIES_AN_HOUR):
        now[0] += engine_thread.HOUR_S / engine_thread.MAX_RECOVERIES_AN_HOUR + 1
        thread._require_few_recoveries(StageLost("once more"))
    now[0] += engine_thread.HOUR_S + 1
    for _ in range(engine_thread.MAX_RECOVERIES_AN_HOUR):
        thread._require_few_recoveries(StageLost("once more"))
    with pytest.raises(StageLost, match="within an hour"):
        thread._require_few_recoveries(StageLost("once more"))
    thread.close()


@pytest.mark.parametrize(("replaced", "told"), [((0, 2), "0,2"), ((), "none")])
def test_a_stage_that_is_replaced_is_one_line_and_counted(
    replaced: Sequence[int], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    running = Running(clock=lambda: now[0])
    assert running.thread.num_recoveries == 0
    running.parts.replaced = replaced

    def take() -> None:
        now[0] += 4.5

    running.parts.recovering = take
    running.add("a", LONG)
    running.add("b", LONG)
    until(lambda: len(running.heard["a"]) > 3)
    running.parts.target.error = StageLost("stage 0 is dead: it's gone")
    until(lambda: running.thread.num_recoveries == 1)
    assert isinstance(running.last("a"), Delta)
    assert isinstance(running.last("b"), Delta)
    running.thread.close()
    [said] = [one for one in caplog.records if one.name.startswith("draftline")]
    assert said.levelname == "WARNING"
    assert said.message == (
        f'event=stage_replaced stage={told} reason="stage 0 is dead: it\'s gone" seconds=4.5 '
        "requests=2"
    )


def test_a_lost_device_of_this_process_is_not_recovered_from(running: Running) -> None:
    running.add("a", LONG)
    running.parts.target.error = DeviceLost("a sticky error")
    assert isinstance(running.last("a"), EngineFailed)
    assert running.parts.num_recoveries == 0
    assert running.thread.health == "failed"


def test_nobody_waits_for_a_thread_that_ends(running: Running) -> None:
    """Requests are added from several threads all the while; each ends, or is refused at once."""
    outcomes: list[str] = []

    def keep_adding(name: str) -> None:
        index = 0
        while True:
            index += 1
            try:
                running.add(f"{name}{index}", 2)
            except (EngineClosed, EngineFailed):
                outcomes.append("refused")
                return

    threads = [threading.Thread(target=keep_adding, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    until(lambda: len(running.heard) > 20)
    running.thread.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert outcomes == ["refused"] * 4
    accepted = [name for name, heard in running.heard.items() if heard]
    assert all(running.ended[name].is_set() for name in accepted)


def test_calls_after_the_end_are_refused(running: Running) -> None:
    running.thread.close()

    async def work() -> None:
        raise AssertionError

    with pytest.raises((EngineClosed, CancelledError)):
        running.thread.call(work()).result(1)
    assert running.thread.health == "closed"


def test_the_watchdog_tells_once() -> None:
    now, told = [0.0], []
    dog = Watchdog(lambda: now[0], told.append)
    assert not dog.look()
    with dog.watching(1.0):
        now[0] = 0.9
        assert not dog.look()
        now[0] = 1.5
        assert dog.look()
    assert told == [1.5]
    assert not dog.look()


def test_what_is_enqueued_runs_in_order_and_a_cancel_finds_it(running: Running) -> None:
    running.add("a", LONG)
    until(lambda: len(running.heard["a"]) > 3)
    names = [f"b{index}" for index in range(20)]
    for name in names:
        running.add(name, 3, enqueued=True)
    running.add("c", LONG, enqueued=True)
    running.thread.cancel("c")
    for name in names:
        assert isinstance(running.last(name), Delta)
        assert len(running.tokens(name)) == 3
    last = running.last("c")
    assert isinstance(last, Delta)
    assert last.finish_reason == "cancelled"
    with pytest.raises(RequestError, match="request_id"):
        running.add("a")
    # The same, told to the sink.
    running.add("a", enqueued=True)
    running.thread.take_enqueued()
    assert any(isinstance(event, RequestError) for event in running.heard["a"])


def test_what_is_enqueued_while_stages_recover_is_refused(running: Running) -> None:
    release = asyncio.Event()
    running.parts.recovering = release.wait
    running.add("a", LONG)
    running.parts.target.error = StageLost("stage 0 is dead")
    until(lambda: running.thread.health == "recovering")
    running.add("b", enqueued=True)
    error = running.last("b")
    assert isinstance(error, StageLost)
    assert "recovering" in str(error)
    running.thread._loop.call_soon_threadsafe(release.set)
    assert isinstance(running.last("a"), Delta)


def test_what_is_enqueued_while_the_thread_is_stuck_hears_of_it(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "GRACE_S", 0.0)
    running.get_stuck("a", limit_s=0.3)
    running.add("b", enqueued=True)
    assert isinstance(running.last("b"), EngineFailed)
    with pytest.raises(EngineFailed):
        running.add("c", enqueued=True)


def test_nothing_enqueued_is_forgotten_by_a_thread_that_ends(running: Running) -> None:
    accepted: list[str] = []

    def keep_adding(name: str) -> None:
        for index in range(100_000):
            try:
                running.add(f"{name}{index}", 2, enqueued=True)
            except (EngineClosed, EngineFailed):
                return
            accepted.append(f"{name}{index}")

    threads = [threading.Thread(target=keep_adding, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    until(lambda: len(accepted) > 50)
    running.thread.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert all(running.ended[name].wait(20) for name in accepted)


def test_after_a_step_all_of_it_is_committed(running: Running) -> None:
    """What a sink asks for runs in the engine's thread, once for as many as hear of one step."""
    rounds: list[tuple[int, int | None]] = []
    waiting: list[str] = []

    def sink(event: Delta | DraftlineError) -> None:
        waiting.append("")
        if len(waiting) == 1:
            running.thread.after_step(hand_over)

    def hand_over() -> None:
        rounds.append((len(waiting), threading.get_ident()))
        waiting.clear()

    params = SamplingParams(max_tokens=30)
    ids = np.array([1, 2, 3], dtype=np.int32)
    for index in range(6):
        request = Request(f"r{index}", ids, params, index, 30, sink)
        running.thread.enqueue(request, StopRule(params, (), 30, NoText()))
    until(lambda: sum(count for count, _ in rounds) == 180)
    assert {ident for _, ident in rounds} == {running.thread._thread.ident}
    assert len(rounds) < 120
    here: list[int] = []
    running.thread.after_step(lambda: here.append(threading.get_ident()))
    assert here == [threading.get_ident()]
