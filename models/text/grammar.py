"""Structured outputs: which tokens a grammar allows, computed in a process of its own.

This is the engine's side of that process; `grammar_worker.py` is the other one.
"""

from __future__ import annotations

import logging
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from ...core.arrays import UInt32
from ...core.errors import DraftlineError, EngineClosed, RequestError, RequestFailed
from ...core.request.allowed_tokens import GrammarMasks, StructuredOutput
from ...core.tree.tree import NO_TREE, TokenTree
from .grammar_messages import Close, Follow, Followed, GrammarSetup, Started

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Memory of the process that handles all grammars of an engine.
MEMORY_BYTES = 8 << 30


class GrammarFactory:
    """Makes constraints for one model. The process behind them starts with the first one."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(index for index in eos_token_ids if index < vocab_size)
        self.process = GrammarProcess(self._setup)

    def constraint(self, output: StructuredOutput) -> Future[GrammarConstraint]:
        """A constraint at the start of an answer. Does not wait.

        This call or the future raises `RequestError`. Cancelling the future drops the constraint.
        """
        if not self._eos_token_ids or getattr(self._tokenizer, "backend_tokenizer", None) is None:
            missing = "fast tokenizer" if self._eos_token_ids else "end-of-sequence token"
            raise RequestError(output.field, f"this model has no {missing}, which it needs")
        form = self.process.new_form(output)
        made: Future[GrammarConstraint] = Future()
        first = self.process.follow(form, NO_TREE)
        first.add_done_callback(partial(_make, self.process, form, made))
        return made

    def close(self) -> None:
        """End the process; constraints fail from now on."""
        self.process.close()

    def _setup(self) -> GrammarSetup:
        tokenizer = getattr(self._tokenizer, "backend_tokenizer").to_str()  # noqa: B009
        return GrammarSetup(tokenizer, self._vocab_size, self._eos_token_ids, MEMORY_BYTES)


class GrammarConstraint:
    """Implements `Constraint` (`core/request/allowed_tokens.py`) over the grammar process."""

    def __init__(self, process: GrammarProcess, form: RequestGrammar, first: UInt32) -> None:
        self._process = process
        self._form = form
        self.first = first

    def follow(self, tree: TokenTree) -> Future[GrammarMasks]:
        """The nodes of `tree` that the grammar allows, and their token masks. Does not wait."""
        return self._process.follow(self._form, tree)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens to the answer."""
        self._form.committed += token_ids

    def close(self) -> None:
        """Free the grammar in the process."""
        self._process.forget(self._form)


def _make(
    process: GrammarProcess,
    form: RequestGrammar,
    made: Future[GrammarConstraint],
    first: Future[GrammarMasks],
) -> None:
    """Complete `made` with the constraint after the grammar's first mask, or with the error of the
    grammar."""
    error = first.exception()
    if not made.set_running_or_notify_cancel() or error is not None:
        process.forget(form)
    if made.cancelled():
        return
    if error is None:
        made.set_result(GrammarConstraint(process, form, first.result().masks[0]))
    else:
        made.set_exception(error)


logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
# Seconds between checks for calls that take too long.
PERIOD_S = 0.1
# Process deaths during the same call after which the call counts as the cause.
MAX_DEATHS = 2


@dataclass(slots=True, eq=False)
class RequestGrammar:
    """One request's grammar: kind and value, the answer so far, and the part that the process has.

    field_name  of the request, for errors
    generation  of the process that has it; num_known of its committed tokens
    """

    form_id: int
    grammar: tuple[str, str]
    field_name: str
    committed: list[int] = field(default_factory=list)
    generation: int = 0
    num_known: int = 0


@dataclass(slots=True, eq=False)
class _Call:
    form: RequestGrammar
    tree: TokenTree
    answer: Future[GrammarMasks]
    deadline: float = 0.0
    num_deaths: int = 0
    settled: threading.Event = field(default_factory=threading.Event)


class GrammarProcess:
    """Starts the process at the first call, and restarts it after a crash or a hang. Thread-safe.

    A call that takes longer than `timeout_s`, or crashes the process, fails. In the first case the
    process is ended. Other calls are retried, with no effect but the delay. If the process cannot
    use the model's tokenizer, it is not restarted, and every call is refused.
    """

    def __init__(
        self,
        setup: Callable[[], GrammarSetup],
        *,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Call | Close | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._retries: list[_Call] = []
        self._num_calls = self._num_forms = self._generation = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._sender: threading.Thread | None = None
        # Why no grammar can be used.
        self._refusal = ""
        self._is_closed = False

    def new_form(self, output: StructuredOutput) -> RequestGrammar:
        """A grammar that was not sent to the process yet."""
        with self._lock:
            self._num_forms += 1
            return RequestGrammar(self._num_forms, (output.kind, output.value), output.field)

    def follow(self, form: RequestGrammar, tree: TokenTree) -> Future[GrammarMasks]:
        """The nodes of `tree` that the grammar allows after its committed tokens. Does not wait.

        The future raises `RequestError`, or `EngineClosed`. One call of a grammar at a time.
        """
        call = _Call(form, tree, Future())
        with self._lock:
            if self._is_closed:
                call.answer.set_exception(EngineClosed("the engine is closed"))
                return call.answer
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_all, daemon=True)
                self._sender.start()
        self._inbox.put(call)
        return call.answer

    def forget(self, form: RequestGrammar) -> None:
        """Free a grammar in the process. Does not wait."""
        if self._sender is not None:
            self._inbox.put(Close(form.form_id))

    def close(self) -> None:
        """End the process; pending calls raise `EngineClosed`. May be called twice."""
        with self._lock:
            self._is_closed = True
            process, calls = self._process, [*self._calls.values(), *self._retries]
            self._calls.clear()
            self._retries.clear()
        self._inbox.put(None)
        if process is not None:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
        for call in calls:
            _settle(call, EngineClosed("the engine is closed"))
        if self._sender is not None:
            self._sender.join(STOP_TIMEOUT_S)

    def _send_all(self) -> None:
        while (item := self._inbox.get()) is not None:
            self._send_retries()
            if isinstance(item, Close):
                self._send(item)
            else:
                self._send_call(item)
        self._drain()

    def _send_retries(self) -> None:
        """Retry calls one by one, to find the one that crashes the process."""
        while True:
            with self._lock:
                if not self._retries:
                    return
                call = self._retries.pop(0)
            call.settled.clear()
            self._send_call(call)
            call.settled.wait()

    def _send_call(self, call: _Call) -> None:
        message: Follow | None = None
        while message is None:
            try:
                self._ensure_process()
            except (OSError, EOFError, TimeoutError) as error:
                logger.error("event=grammar_process_failed error=%s", type(error).__name__)
                _settle(call, RequestFailed("structured outputs cannot be had now; try again"))
                return
            if self._refusal:
                _settle(call, _refused(call, self._refusal))
                return
            message = self._begin(call)
        self._send(message)

    def _begin(self, call: _Call) -> Follow | None:
        """Register the call for its answer, and return its message; None: the process is gone."""
        form = call.form
        with self._lock:
            if self._process is None:
                return None
            is_known = form.generation == self._generation
            first = form.num_known if is_known else 0
            committed = tuple(form.committed[first:])
            form.generation, form.num_known = self._generation, len(form.committed)
            self._num_calls += 1
            call.deadline = self._clock() + self._timeout_s
            self._calls[self._num_calls] = call
            return Follow(
                self._num_calls,
                form.form_id,
                None if is_known else form.grammar,
                committed,
                call.tree.tokens.tolist(),
                call.tree.parents.tolist(),
            )

    def _send(self, message: Follow | Close) -> None:
        connection = self._connection
        if connection is not None:
            # If the process is dead, its reader retries the call.
            with suppress(OSError):
                connection.send(message)

    def _ensure_process(self) -> None:
        with self._lock:
            if self._is_closed:
                raise EOFError
            if self._process is not None or self._refusal:
                return
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.grammar_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # The library's message may quote a tenant's grammar.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        connection = Connection(ours.detach())
        try:
            connection.send(self._setup())
            if not connection.poll(START_TIMEOUT_S):
                raise TimeoutError
            started = connection.recv()
            assert isinstance(started, Started)
        except BaseException:
            process.kill()
            process.wait()
            connection.close()
            raise
        if started.error:
            logger.error("event=grammar_process_refused error=%s", started.error)
            process.kill()
            process.wait()
            connection.close()
            self._refusal = started.error
            return
        with self._lock:
            self._process, self._connection = process, connection
            self._generation += 1
            if self._is_closed:
                # Its reader cleans up.
                process.kill()
        threading.Thread(target=self._read_all, args=(process, connection), daemon=True).start()

    def _read_all(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        """Complete calls until the process dies or a call takes too long; then retry the others."""
        late: list[_Call] = []
        with suppress(EOFError, OSError):
            while not late:
                if connection.poll(PERIOD_S):
                    self._settle_one(connection.recv())
                late = self._late()
        process.kill()
        status = process.wait()
        with self._lock:
            self._process = self._connection = None
            calls = list(self._calls.values())
            self._calls.clear()
        connection.close()
        if not self._is_closed:
            logger.warning("event=grammar_process_ended status=%s calls=%d", status, len(calls))
        self._retry(calls, late)

    def _retry(self, calls: list[_Call], late: list[_Call]) -> None:
        again = []
        for call in calls:
            call.num_deaths += 1
            if call in late:
                _settle(call, _refused(call, f"takes longer than {self._timeout_s:g} s to follow"))
            elif call.num_deaths >= MAX_DEATHS:
                _settle(call, _refused(call, "cannot be followed: it takes too much"))
            else:
                again.append(call)
        with self._lock:
            self._retries += again
        for call in calls:
            call.settled.set()
        # The sender thread retries the calls.
        self._inbox.put(Close(0))

    def _late(self) -> list[_Call]:
        now = self._clock()
        with self._lock:
            return [call for call in self._calls.values() if now > call.deadline]

    def _settle_one(self, followed: Followed) -> None:
        with self._lock:
            call = self._calls.pop(followed.call_id, None)
        if call is not None:
            error = followed.error
            _settle(call, _refused(call, error) if error else _form(call, followed))

    def _drain(self) -> None:
        """Refuse the calls that were queued while the process ended."""
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _Call):
                _settle(item, EngineClosed("the engine is closed"))


def _refused(call: _Call, message: str) -> RequestError:
    return RequestError(call.form.field_name, message)


def _form(call: _Call, followed: Followed) -> GrammarMasks:
    rows = list(followed.rows)
    allowed = np.frombuffer(followed.masks, dtype=np.uint32).reshape(len(rows), -1)
    masks = np.zeros((1 + len(call.tree), allowed.shape[1]), dtype=np.uint32)
    masks[rows] = allowed
    accepted = np.zeros(1 + len(call.tree), dtype=np.bool_)
    accepted[rows] = True
    return GrammarMasks(accepted[1:], masks)


def _settle(call: _Call, result: GrammarMasks | DraftlineError) -> None:
    call.settled.set()
    # The request may have ended and cancelled its future.
    if call.answer.done() or not call.answer.set_running_or_notify_cancel():
        return
    if isinstance(result, DraftlineError):
        call.answer.set_exception(result)
    else:
        call.answer.set_result(result)
