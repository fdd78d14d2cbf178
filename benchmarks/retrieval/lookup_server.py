"""A retrieval server in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...actors.retrieval_server import RetrievalServer
from ...core.interfaces import Lookup


@contextmanager
def served(lookup: Lookup) -> Iterator[str]:
    """The address of a server in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(_started(lookup), loop).result()
    yield f"127.0.0.1:{server[1]}"
    asyncio.run_coroutine_threadsafe(server[0].stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _started(lookup: Lookup) -> tuple[RetrievalServer, int]:
    server = RetrievalServer(lookup)
    return server, await server.start()
