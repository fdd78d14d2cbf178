"""The store of a retrieval drafter: in this process, or on retrieval servers over gRPC."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from ..core.arrays import Int32
from ..core.errors import CapacityError, DrafterError, ProtocolError
from ..core.interfaces import Ended, Learner, Lookup, Subtree, empty_subtree
from ..retrieval_store.delta.settings import Fingerprint
from ..retrieval_store.learning import LearningQueue
from ..retrieval_store.search.lookup import LookupRule, load_compiled_lookup
from ..retrieval_store.serving.open_store import open_learning, open_store
from ..retrieval_store.serving.service import Expected, RetrievalService
from ..retrieval_store.wire import (
    LEARN_METHOD,
    METHOD,
    REFUSED,
    decode_counts,
    decode_reply,
    encode_learn,
    encode_request,
)
from .links.access import TlsFiles, token_metadata
from .links.failures import CircuitBreaker, RetryPolicy

# What reads a model's settings imports transformers, which takes seconds, so it is imported where
# it is used.

# Folders send no notifications. Other replicas find what one has learned within a second.
LEARNING_POLL_S = 0.5
# No request waits for learning, so a server that is busy with lookups may take long.
LEARN_TIMEOUT_S = 5.0
logger = logging.getLogger(__name__)
# Trailing metadata of a refusal: the names, with commas between.
DENIED_KEY = "draftline-denied-namespaces"
# An operator may widen a token's scope; then its texts are found again after so long.
FORGET_S = 60.0
MAX_NAMES = 4096
# A restart takes seconds; a replica that is tried in vain takes a part of the others' time.
RETRY = RetryPolicy(tolerated=0, first_delay_s=0.2, max_delay_s=5.0)


@dataclass(frozen=True, slots=True)
class RetrievalSource:
    """A store; `learner` is None where nothing is learned, `free` ends threads and connections."""

    lookup: Lookup
    free: Callable[[], None]
    learner: Learner | None = None


def open_source(
    url: str,
    model: str | None,
    learns_for: str | None,
    learn_off: Collection[str],
    rule: LookupRule | None = None,
) -> RetrievalSource:
    """A store, its segments checked against `model` where that is given, and followed.

    With `learns_for`, the served model, ended requests are learned, but for the namespaces in
    `learn_off`; a folder need not exist then. Raises `StoreError` and `ConfigError`.
    """
    # The first lookup would compile its loops within a step.
    load_compiled_lookup()
    expected = None
    if model is not None:
        from ..models.load.model_info import read_model_info  # noqa: PLC0415
        from ..models.text.fingerprint import tokenizer_hash  # noqa: PLC0415

        info = read_model_info(model)
        expected = Expected(tokenizer_hash=tokenizer_hash(info.path), vocab_size=info.vocab_size)
    learning = None
    if learns_for is not None:
        learning = open_learning(url, model_fingerprint(learns_for), learn_off)
    store = open_store(url, must_exist=learning is None)
    poll_seconds = 1.0 if learning is None else LEARNING_POLL_S
    service = RetrievalService(store, expected, poll_seconds, learning=learning, rule=rule)
    service.refresh()
    service.start()
    if learning is None:
        return RetrievalSource(service, service.stop)
    return _learning_source(service, service.stop, LearningQueue(service.learn))


def open_servers(
    addresses: Sequence[str],
    learns_for: str | None,
    tls: TlsFiles | None = None,
    token: str | None = None,
) -> RetrievalSource:
    """Replicas of a retrieval server, which learn ended requests of the model `learns_for`.

    All of them take the same certificates and token. Raises `ConfigError` for a TLS file that
    cannot be read.
    """
    clients = [GrpcLookup(address.strip(), tls=tls, token=token) for address in addresses]
    lookup = ReplicatedLookup(clients)
    if learns_for is None:
        return RetrievalSource(lookup, lookup.close)
    fingerprint = model_fingerprint(learns_for)

    def learn(ended: Ended) -> dict[str, int]:
        # All replicas write to one store, so one answer is enough.
        for client in clients[:-1]:
            with contextlib.suppress(DrafterError):
                return client.learn(ended, fingerprint)
        return clients[-1].learn(ended, fingerprint)

    return _learning_source(lookup, lookup.close, LearningQueue(learn))


def _learning_source(
    lookup: Lookup, close: Callable[[], None], learner: LearningQueue
) -> RetrievalSource:
    def free() -> None:
        learner.close()
        close()

    return RetrievalSource(lookup, free, learner)


def model_fingerprint(model: str) -> Fingerprint:
    """Fingerprints and vocabulary of a model: a folder, hub id or bundled name.

    Raises `CheckpointError`.
    """
    # transformers takes seconds to import, and most lookups need no model.
    from ..models.load.model_info import read_model_info  # noqa: PLC0415
    from ..models.text.fingerprint import model_hash, tokenizer_hash  # noqa: PLC0415

    info = read_model_info(model)
    return Fingerprint(
        tokenizer_hash=tokenizer_hash(info.path),
        model_hash=model_hash(info.path),
        vocab_size=info.vocab_size,
    )


class GrpcLookup:
    """Lookups by one server over gRPC; blocks the calling thread.

    address      host:port of a retrieval server
    timeout_s    each call's deadline, in seconds, unless the call gives its own
    tls          certificates; None is plain text
    token        shown with every call; None: the server must ask for none

    Namespaces that the token is not for are left out, which is said once for each: nothing is found
    for their contexts, and the others of a batch are served.

    The connection is made in the background and again after a loss. Whatever goes wrong is a
    `DrafterError`; a server that has no time for a batch is a `CapacityError`.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 0.1,
        tls: TlsFiles | None = None,
        token: str | None = None,
    ) -> None:
        self._address = address
        self._metadata = token_metadata(token)
        self._denied = DeniedNamespaces(address)
        self._timeout_s = timeout_s
        # Reconnect within a second; gRPC's own default grows to two minutes.
        options: list[tuple[str, int | str]] = [
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if tls is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            options += tls.channel_options()
            self._channel = grpc.secure_channel(address, tls.channel_credentials(), options)
        self._call = self._channel.unary_unary(METHOD)
        self._learn = self._channel.unary_unary(LEARN_METHOD)

    def lookup(
        self,
        contexts: Sequence[Int32],
        namespaces: Sequence[str],
        max_nodes: Sequence[int],
        *,
        timeout_s: float | None = None,
    ) -> list[Subtree]:
        """One subtree a context, in order; see `core.interfaces.Lookup`."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        answers = [empty_subtree() for _ in contexts]
        indices = self._denied.allowed(namespaces)
        while indices:
            try:
                subtrees = self._ask(
                    [contexts[index] for index in indices],
                    [namespaces[index] for index in indices],
                    [max_nodes[index] for index in indices],
                    timeout_s,
                )
            except _Denied as denied:
                # Once for each namespace that was not known to be refused.
                if not self._denied.add(denied.namespaces & set(namespaces)):
                    raise DrafterError(str(denied)) from denied
                indices = self._denied.allowed(namespaces)
                continue
            for index, subtree in zip(indices, subtrees, strict=True):
                answers[index] = subtree
            break
        return answers

    def _ask(
        self,
        contexts: Sequence[Int32],
        namespaces: Sequence[str],
        max_nodes: Sequence[int],
        timeout_s: float,
    ) -> list[Subtree]:
        """One call. Raises `_Denied` where the token is not for one of the namespaces."""
        request = encode_request(contexts, namespaces, max_nodes)
        try:
            data = self._call(request, timeout=timeout_s, metadata=self._metadata)
            return decode_reply(data, len(contexts))
        except grpc.RpcError as error:
            if denied := _denied_names(error):
                reason = f"retrieval server {self._address}: {_reason(error)}"
                raise _Denied(reason, denied) from error
            if _is_refusal(error):
                raise CapacityError(f"{self._address}: {_reason(error)}") from error
            raise DrafterError(f"retrieval server {self._address}: {_reason(error)}") from error
        except ProtocolError as error:
            raise DrafterError(f"retrieval server {self._address}: bad answer ({error})") from error

    def learn(self, ended: Ended, fingerprint: Fingerprint) -> dict[str, int]:
        """Have an ended request learned: what became of it, see `core.interfaces.OUTCOMES`.

        Raises `DrafterError`, also if the server refuses it.
        """
        try:
            data = self._learn(
                encode_learn(ended, fingerprint), timeout=LEARN_TIMEOUT_S, metadata=self._metadata
            )
            return decode_counts(data)
        except grpc.RpcError as error:
            raise DrafterError(f"retrieval server {self._address}: {_reason(error)}") from error
        except ProtocolError as error:
            raise DrafterError(f"retrieval server {self._address}: bad answer ({error})") from error

    def close(self) -> None:
        """Close the connection; a call under way fails."""
        self._channel.close()


class _Denied(Exception):
    """The token is not for these namespaces."""

    def __init__(self, message: str, namespaces: frozenset[str]) -> None:
        super().__init__(message)
        self.namespaces = namespaces


def _denied_names(error: grpc.RpcError) -> frozenset[str]:
    if not isinstance(error, grpc.Call) or error.code() is not grpc.StatusCode.PERMISSION_DENIED:
        return frozenset()
    # Pairs of key and value, which grpc's types do not say.
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == DENIED_KEY and isinstance(value, str):
            return frozenset(value.split(",")) - {""}
    return frozenset()


def _is_refusal(error: grpc.RpcError) -> bool:
    return (
        isinstance(error, grpc.Call)
        and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        and (error.details() or "").startswith(REFUSED)
    )


def _reason(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name} {error.details()}"
    return str(error)


class DeniedNamespaces:
    """Leaves refused namespaces out of lookups, so that the other requests of a batch are served.

    Each is said once. Asked again after `FORGET_S`. One thread at a time may use it.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._clock = clock
        self._until: dict[str, float] = {}
        self._said: set[str] = set()

    def add(self, namespaces: Iterable[str]) -> bool:
        """Remember refused ones; whether any of them was not known."""
        now = self._clock()
        fresh = [name for name in namespaces if self._until.get(name, 0.0) <= now]
        if len(self._until) + len(fresh) > MAX_NAMES:
            self._until.clear()
        for name in fresh:
            self._until[name] = now + FORGET_S
            if name not in self._said and len(self._said) < MAX_NAMES:
                self._said.add(name)
                logger.warning(
                    "event=namespace_denied server=%s namespace=%s fix=list the namespace beside "
                    "this token in the retrieval server's --token-file",
                    self._address,
                    name,
                )
        return bool(fresh)

    def allowed(self, namespaces: Sequence[str]) -> list[int]:
        """Positions of those that may be asked for."""
        if not self._until:
            return list(range(len(namespaces)))
        now = self._clock()
        return [index for index, name in enumerate(namespaces) if self._until.get(name, 0.0) <= now]


class Replica(Protocol):
    """One server; see `GrpcLookup`."""

    def lookup(
        self,
        contexts: Sequence[Int32],
        namespaces: Sequence[str],
        max_nodes: Sequence[int],
        *,
        timeout_s: float | None = None,
    ) -> list[Subtree]:
        """See `Lookup.lookup`. Raises `DrafterError`, or `CapacityError` if it has no time."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


_Entry = tuple[Replica, CircuitBreaker]


class ReplicatedLookup:
    """Implements `core.interfaces.Lookup` over replicas that serve the same store.

    timeout_s  for the answer to one batch, in seconds, over all replicas
    clock      seconds; only differences count

    Batches go to the replicas in turn. One that fails is left out for a while, and its batch goes
    to the next within the same time, so that a replica's death loses nothing. One without time
    for the batch is no failure; if no other has any, nothing is found.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        timeout_s: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rng = random.Random()
        self._entries: list[_Entry] = [
            (replica, CircuitBreaker(RETRY, rng)) for replica in replicas
        ]
        self._timeout_s = timeout_s
        self._clock = clock
        self._turns = itertools.count()

    def lookup(
        self, contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
    ) -> list[Subtree]:
        """One subtree a context, in order; `DrafterError` if every replica failed."""
        end = self._clock() + self._timeout_s
        failure: DrafterError | None = None
        is_refused = False
        for group in self._groups():
            for index, (replica, breaker) in enumerate(group):
                # The next ones need time, too, if this one does not answer at all.
                share = max(0.0, end - self._clock()) / (len(group) - index)
                try:
                    subtrees = replica.lookup(contexts, namespaces, max_nodes, timeout_s=share)
                except CapacityError:
                    is_refused = True
                    breaker.succeed()
                except DrafterError as error:
                    failure = error
                    breaker.fail(self._clock())
                else:
                    breaker.succeed()
                    return subtrees
            if is_refused or self._clock() >= end:
                break
        if failure is not None and not is_refused:
            raise failure
        return [empty_subtree() for _ in contexts]

    def close(self) -> None:
        """Close all connections."""
        for replica, _ in self._entries:
            replica.close()

    def _groups(self) -> tuple[list[_Entry], list[_Entry]]:
        """Those that are well, from the one whose turn it is; and the others, to try if need be."""
        first = next(self._turns) % len(self._entries)
        turned = self._entries[first:] + self._entries[:first]
        now = self._clock()
        well = [entry for entry in turned if entry[1].retry_at <= now]
        left_out = [entry for entry in turned if entry[1].retry_at > now]
        return well, sorted(left_out, key=lambda entry: entry[1].retry_at)
