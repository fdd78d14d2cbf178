"""The grammar process: `python -m draftline.models.text.grammar_worker FD`.

It may be slow, run out of memory or crash in the library without hurting the engine.
`grammar_process.py` is the other end of the socket FD.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

from ...core.errors import RequestError
from .grammar_messages import Close, Follow, Followed, GrammarSetup, Started
from .grammar_vocabulary import grammar_tokenizer
from .matcher import FIELD, Matcher

# Lower priority than the engine and its API, for machines with few cores.
NICENESS = 5
NUM_FOLLOWERS = 2


class Worker:
    """Matchers by grammar, and the threads that use them; a grammar has one call at a time."""

    def __init__(self, setup: GrammarSetup) -> None:
        self._setup = setup
        self._tokenizer = grammar_tokenizer(setup.tokenizer, setup.vocab_size, setup.end_ids)
        self._matchers: dict[int, Matcher] = {}
        self._lock = threading.Lock()

    def follow(self, call: Follow) -> Followed:
        """Answer a call; the first call of a grammar includes its definition."""
        try:
            rows, masks = self._matcher(call).follow(call.tokens, call.parents)
        except RequestError as error:
            return Followed(call.call_id, (), b"", error.message)
        except MemoryError:
            return Followed(call.call_id, (), b"", "takes more memory than there is for forms")
        return Followed(call.call_id, tuple(rows), masks.tobytes(), "")

    def close(self, call: Close) -> None:
        """Free a grammar."""
        with self._lock:
            self._matchers.pop(call.form_id, None)

    def _matcher(self, call: Follow) -> Matcher:
        if call.grammar is not None:
            setup = self._setup
            matcher = Matcher(self._tokenizer, call.grammar, setup.vocab_size, setup.end_ids)
            with self._lock:
                self._matchers[call.form_id] = matcher
        else:
            with self._lock:
                matcher = self._matchers.get(call.form_id)
            if matcher is None:
                raise RequestError(FIELD, "cannot be followed any more")
        matcher.advance(call.committed)
        return matcher


def serve(connection: Connection) -> None:
    """Answer until the other end is closed."""
    setup = connection.recv()
    assert isinstance(setup, GrammarSetup)
    resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    try:
        worker = Worker(setup)
    except ValueError as error:
        connection.send(Started(f"cannot be followed with this model's tokenizer: {error}"))
        return
    connection.send(Started())
    sending = threading.Lock()

    def answer(call: Follow) -> None:
        answered = worker.follow(call)
        with sending:
            connection.send(answered)

    # Preparing a grammar may take seconds; it must not delay the prepared ones.
    openers = ThreadPoolExecutor(1)
    followers = ThreadPoolExecutor(NUM_FOLLOWERS)
    while True:
        call = connection.recv()
        if isinstance(call, Close):
            worker.close(call)
        else:
            (followers if call.grammar is None else openers).submit(answer, call)


def main() -> None:
    """Serve the socket that the command line names until its other end is closed."""
    os.nice(NICENESS)
    with suppress(EOFError, ConnectionError):
        serve(Connection(int(sys.argv[1])))
    # Threads may still be in the library; their results are no longer needed.
    os._exit(0)


if __name__ == "__main__":
    main()
