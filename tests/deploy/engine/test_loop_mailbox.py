"""What an engine's thread tells many readers wakes their loop once."""

from __future__ import annotations

import asyncio
import threading

from draftline.deploy.engine.loop_mailbox import LoopMailbox


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
