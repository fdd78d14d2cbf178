"""Calls between an event loop and threads that may outlive it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
T = TypeVar("T")

# Threads that run Python keep the interpreter for 5 ms each time they get it: so many of them make
# a loop wait for at most some 20 ms. Tokenizers and numpy run beside it.
MAX_BUSY_THREADS = 4
# What is left on a loop at its end has so long to end by itself.
END_TIMEOUT_S = 1.0
_busy = ThreadPoolExecutor(MAX_BUSY_THREADS, thread_name_prefix="draftline-work")
_pause_lock = threading.Lock()
# Whether the collector was at work when each of the pauses that last began.
_pauses: list[bool] = []
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def off_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of work that takes long enough to hold up a loop, in one of a few threads.

    Work waits until a thread is free, so it must not block on anything but the processor. A single
    call into C code that keeps the interpreter's lock holds up the loop from there, too.
    """
    loop = asyncio.get_running_loop()
    turns = _turns.get(loop)
    if turns is None:
        turns = _turns[loop] = asyncio.Semaphore(MAX_BUSY_THREADS)
    # Work waits here rather than in the pool: handing over hundreds of calls at once, and taking
    # their results at once, each time against busy threads, would hold up the loop.
    async with turns:
        return await loop.run_in_executor(_busy, partial(function, *args, **kwargs))


def call_on_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object
) -> None:
    """Run `function` on the loop soon; does nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):  # the loop may close between any check and the call
        loop.call_soon_threadsafe(function, *args)


async def end_tasks() -> None:
    """End all other tasks of this loop, before it is closed, so that no caller waits for ever.

    Calls of gRPC that were cancelled end by themselves, when its threads say so: those of all loops
    of a process say it to any of them, where word for a loop that is closed is an error, and keeps
    back what came for the others.
    """
    # Calls that were handed over in the last moment become tasks first.
    await asyncio.sleep(0)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=END_TIMEOUT_S)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def spare_collector() -> None:
    """Keep the garbage collector away from what a process has loaded by now, for good.

    A full collection looks at every object, and nothing else runs meanwhile: with torch and
    transformers loaded that is some tenths of a second, at times that depend on requests. At the
    process's end it is let at them again: some libraries complain about what is left then.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector in all threads, for work that makes very many objects.

    A collection looks at all of them, again and again while they become more, and keeps the
    interpreter's lock from all other threads until it is done.
    """
    with _pause_lock:
        _pauses.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _pause_lock:
            was_enabled = _pauses.pop()
            if was_enabled and not _pauses:
                gc.enable()


async def in_daemon_thread(function: Callable[[], None]) -> None:
    """Wait for a call that may hang; its thread never keeps the process alive.

    Raises what `function` raises.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def call() -> None:
        error: Exception | None = None
        try:
            function()
        except Exception as raised:  # noqa: BLE001 - it is raised again where the caller waits
            error = raised
        call_on_loop(loop, finish, error)

    threading.Thread(target=call, daemon=True).start()
    await done
