"""Sinks hear of a step when the next one is on its way; one that fails hurts no other."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from draftline.core.engine import OutputQueue
from draftline.core.errors import DraftlineError, RequestError, RequestFailed
from draftline.core.request.output import Delta
from draftline.core.request.request import Request, RequestState, RequestStats, Sink
from draftline.core.request.sampling_params import SamplingParams
from draftline.core.request.stop import StopRule
from support.fakes.fake_bench import Bench, NoText


def state_of(name: str, sink: Sink) -> RequestState:
    params = SamplingParams(max_tokens=4)
    request = Request(name, np.array([1], dtype=np.int32), params, 0, 4, sink)
    return RequestState(request, StopRule(params, (), 4, NoText()), RequestStats(arrival_time=0.0))


def delta(name: str, *tokens: int, finish_reason: str | None = None) -> Delta:
    return Delta(name, tokens, (), "", finish_reason)


def test_events_are_told_in_order_once_they_are_delivered() -> None:
    heard: list[tuple[str, tuple[int, ...]]] = []

    def sink(event: Delta | DraftlineError) -> None:
        assert isinstance(event, Delta)
        heard.append((event.request_id, event.token_ids))

    outbox = OutputQueue(lambda *_: None)
    first, second = state_of("a", sink), state_of("b", sink)
    for state, token in ((first, 1), (second, 2), (first, 3)):
        outbox.post(state, delta(state.request_id, token))
    assert not heard
    outbox.deliver()
    assert heard == [("a", (1,)), ("b", (2,)), ("a", (3,))]
    outbox.deliver()
    assert len(heard) == 3


def test_a_sink_that_fails_ends_its_request_and_no_other() -> None:
    heard: list[str] = []
    failed: list[tuple[str, DraftlineError]] = []

    def broken(_event: Delta | DraftlineError) -> None:
        raise ValueError("no room")

    outbox = OutputQueue(lambda state, error: failed.append((state.request_id, error)))
    outbox.post(state_of("a", broken), delta("a", 1))
    outbox.post(state_of("b", lambda _: heard.append("b")), delta("b", 1))
    outbox.deliver()
    assert heard == ["b"]
    [(name, error)] = failed
    assert name == "a"
    assert isinstance(error, RequestFailed)


def test_what_a_sink_causes_is_told_after_what_waits() -> None:
    heard: list[object] = []
    outbox = OutputQueue(lambda *_: None)
    other = state_of("b", heard.append)

    def sink(event: Delta | DraftlineError) -> None:
        heard.append(event)
        outbox.post(other, RequestError("prompt", "ends"))
        outbox.deliver()

    outbox.post(state_of("a", sink), delta("a", 1))
    outbox.post(other, delta("b", 2))
    outbox.deliver()
    assert [type(event) for event in heard] == [Delta, Delta, RequestError]


@pytest.mark.parametrize("last", [delta("a", finish_reason="stop"), RequestError("prompt", "ends")])
def test_a_last_word_that_cannot_be_told_is_logged(
    last: Delta | DraftlineError, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_event: Delta | DraftlineError) -> None:
        raise ValueError("what the tenant wrote")

    failed: list[object] = []
    outbox = OutputQueue(lambda *parts: failed.append(parts))
    with caplog.at_level(logging.ERROR):
        outbox.tell(state_of("a", broken), last)
    assert not failed
    assert "sink_failed" in caplog.text
    assert "tenant" not in caplog.text


async def test_a_step_is_on_its_way_when_sinks_hear_of_the_one_before() -> None:
    """Where no drafter of another process is waited for."""
    bench = Bench(seed=1)
    bench.add("a", [1, 2, 3], 30, False)
    state = bench.core._states["a"]
    submitted: list[tuple[int, bool]] = []
    whole = state.request.sink

    def sink(event: Delta | DraftlineError) -> None:
        assert isinstance(event, Delta)
        submitted.append((len(bench.core._in_flight), event.finish_reason is not None))
        whole(event)

    object.__setattr__(state.request, "sink", sink)
    await bench.run()
    assert len(submitted) > 3
    # The last one has none behind it.
    assert all(count == (0 if is_last else 1) for count, is_last in submitted)
