"""What waits for a stream's reader is bounded, and the engine never waits for it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from draftline import AsyncEngine, EngineConfig, SamplingParams
from draftline.core.errors import ReaderTooSlow, StageLost
from draftline.core.request.output import Delta, TokenLogProb
from draftline.deploy.api.errors import to_api_error
from draftline.deploy.engine.delta_queue import DELTA_BYTES, DeltaQueue, LoopMailbox, delta_bytes


def delta(text: str = "") -> Delta:
    return Delta(request_id="r", token_ids=(1,), sources=("target",), text=text)


async def test_deltas_come_in_order_and_an_error_last() -> None:
    queue = DeltaQueue(asyncio.get_running_loop(), 10**6, on_full=pytest.fail)
    for text in "abc":
        queue.on_output(delta(text))
    queue.on_output(StageLost("gone"))
    assert [(await queue.next()).text for _ in range(3)] == ["a", "b", "c"]
    with pytest.raises(StageLost):
        await queue.next()


async def test_too_much_that_waits_ends_the_request_once() -> None:
    calls: list[int] = []
    queue = DeltaQueue(asyncio.get_running_loop(), 4 * DELTA_BYTES, on_full=lambda: calls.append(1))
    for _ in range(10):
        queue.on_output(delta())
    await asyncio.sleep(0)
    assert calls == [1]
    with pytest.raises(ReaderTooSlow, match="2000 bytes") as caught:
        await queue.next()
    assert queue._events.empty()
    answer = to_api_error(caught.value)
    assert (answer.status, answer.message.startswith("the client reads too slowly")) == (408, True)


async def test_what_was_read_makes_room() -> None:
    queue = DeltaQueue(asyncio.get_running_loop(), 4 * DELTA_BYTES, on_full=pytest.fail)
    read: list[Delta] = []
    for index in range(100):
        queue.on_output(delta(str(index)))
        read.append(await queue.next())
    assert [one.text for one in read] == [str(index) for index in range(100)]


async def test_one_large_delta_passes() -> None:
    queue = DeltaQueue(asyncio.get_running_loop(), 1000, on_full=pytest.fail)
    queue.on_output(delta("a" * 5000))
    assert len((await queue.next()).text) == 5000


def test_alternatives_count() -> None:
    token = TokenLogProb(1, -1.0, tuple(range(20)), (-1.0,) * 20)
    plain = delta()
    rich = Delta(
        request_id="r", token_ids=(1,), sources=("target",), text="",
        log_probs=(token,),
        prompt_log_probs=(None, token),
    )  # fmt: skip
    assert delta_bytes(rich) > delta_bytes(plain) + 40 * 50


async def test_a_request_whose_answer_nobody_reads_is_cancelled(checkpoint: Path) -> None:
    # A token a delta; a loaded machine may read the other request some deltas late.
    config = EngineConfig(model=str(checkpoint), kv_cache_tokens=1024, multi_step_ms=0)
    engine = AsyncEngine(config, max_unread_bytes=60 * DELTA_BYTES)
    await engine.start()
    try:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        silent = engine.stream("abc", params)
        first = await anext(silent)
        # Another request runs to its end meanwhile.
        other = await engine.generate("abc", params)
        assert len(other.token_ids) == 200
        async with asyncio.timeout(30):
            while engine.stats().num_running:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        assert first.finish_reason is None
        with pytest.raises(ReaderTooSlow):
            async for _ in silent:
                pass
    finally:
        await engine.close()


async def test_all_that_waits_is_read_at_once_and_an_error_after_it() -> None:
    queue = DeltaQueue(asyncio.get_running_loop(), 4 * DELTA_BYTES, on_full=pytest.fail)
    for text in "ab":
        queue.put(delta(text))
    assert [one.text for one in await queue.next_all()] == ["a", "b"]
    for text in "cde":
        queue.put(delta(text))
    queue.put(StageLost("gone"))
    assert [one.text for one in await queue.next_all()] == ["c", "d", "e"]
    with pytest.raises(StageLost):
        await queue.next_all()


async def test_calls_of_other_threads_arrive_in_order_and_none_is_lost() -> None:
    mailbox = LoopMailbox.of(asyncio.get_running_loop())
    heard: list[tuple[int, int]] = []
    threads = [
        threading.Thread(
            target=lambda name=name: [mailbox.post(heard.append, (name, i)) for i in range(2000)]
        )
        for name in range(3)
    ]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(30):
        while len(heard) < 6000:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0)
    for name in range(3):
        assert [index for who, index in heard if who == name] == list(range(2000))


async def test_events_that_come_together_are_delivered_together() -> None:
    loop = asyncio.get_running_loop()
    mailbox = LoopMailbox.of(loop)
    assert LoopMailbox.of(loop) is mailbox
    heard: list[int] = []
    for index in range(5):
        mailbox.post(heard.append, index)
    assert heard == []
    turns = 0
    while len(heard) < 5:
        await asyncio.sleep(0)
        turns += 1
    assert (heard, turns) == ([0, 1, 2, 3, 4], 1)


async def test_a_call_that_fails_keeps_nothing_from_the_others() -> None:
    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda _loop, context: failures.append(context["exception"]))
    mailbox, heard = LoopMailbox.of(loop), []
    for call in (heard.append, {}.__getitem__, heard.append):
        mailbox.post(call, 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert heard == [1, 1]
    assert [type(one) for one in failures] == [KeyError]


def test_a_closed_loop_hears_nothing_more() -> None:
    loop = asyncio.new_event_loop()
    mailbox, heard = LoopMailbox.of(loop), []
    loop.close()
    mailbox.post(heard.append, 1)
    assert heard == []
    assert not mailbox._calls
