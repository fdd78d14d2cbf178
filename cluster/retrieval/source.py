"""Opens the store of a retrieval drafter: in this process, or on servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ...core.errors import DrafterError
from ...core.interfaces import Ended, Learner, Lookup
from ...retrieval_store.delta.fingerprint import Fingerprint
from ...retrieval_store.learning.queue import LearningQueue
from ...retrieval_store.search.lookup import LookupRule, load_compiled_lookup
from ...retrieval_store.serving.open_store import open_learning, open_store
from ...retrieval_store.serving.service import Expected, RetrievalService
from ..links.tls_files import TlsFiles
from .client import GrpcLookup, ReplicatedLookup

# What reads a model's settings imports transformers, which takes seconds, so it is imported where
# it is used.

# Folders send no notifications. Other replicas find what one has learned within a second.
LEARNING_POLL_S = 0.5


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
        from ...models.load.model_info import read_model_info  # noqa: PLC0415
        from ...models.text.fingerprint import tokenizer_hash  # noqa: PLC0415

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
    from ...models.load.model_info import read_model_info  # noqa: PLC0415
    from ...models.text.fingerprint import model_hash, tokenizer_hash  # noqa: PLC0415

    info = read_model_info(model)
    return Fingerprint(
        tokenizer_hash=tokenizer_hash(info.path),
        model_hash=model_hash(info.path),
        vocab_size=info.vocab_size,
    )
