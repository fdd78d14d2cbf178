"""Signs of life in a stream without items, and an error for their absence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from .resume import NoReplica, ReplicaDied

T = TypeVar("T")


async def with_heartbeats(
    items: AsyncGenerator[T, None], period_s: float
) -> AsyncGenerator[T | None, None]:
    """The items, and None whenever no item came for `period_s`. Closing it closes `items`."""
    waiting: asyncio.Future[T] | None = None
    async with aclosing(items):
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(anext(items))
                done, _ = await asyncio.wait({waiting}, timeout=period_s)
                if not done:
                    yield None
                    continue
                try:
                    item = waiting.result()
                except StopAsyncIteration:
                    return
                waiting = None
                yield item
        finally:
            if waiting is not None:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)


async def without_heartbeats(
    items: AsyncIterator[T | None], silence_s: float, is_served: Callable[[], Awaitable[bool]]
) -> AsyncGenerator[T, None]:
    """The items of `with_heartbeats`. Raises `ReplicaDied` after a silence of `silence_s`.

    Before the first sign of life the stream may wait for its turn, with nobody to say so: then
    `is_served` is asked, after each such silence, whether requests are served at all. Where they
    are not, raises `NoReplica`.
    """
    has_begun = False
    while True:
        waiting = asyncio.ensure_future(anext(items))
        try:
            while not (await asyncio.wait({waiting}, timeout=silence_s))[0]:
                problem = f"the replica of this request is silent for {silence_s:g} s"
                if has_begun:
                    raise ReplicaDied(problem)
                if not await is_served():
                    raise NoReplica(problem)
            item = waiting.result()
        except StopAsyncIteration:
            return
        finally:
            waiting.cancel()
        has_begun = True
        if item is not None:
            yield item
