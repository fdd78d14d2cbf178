"""The store of a retrieval drafter: opened, checked against the served model, and followed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..core.interfaces import Learner, Lookup
from ..retrieval_store.delta.settings import Fingerprint
from ..retrieval_store.learning import LearningQueue
from ..retrieval_store.search.lookup import LookupRule, load_compiled_lookup
from ..retrieval_store.serving.open_store import open_learning, open_store
from ..retrieval_store.serving.service import Expected, RetrievalService

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
    learner = LearningQueue(service.learn)

    def free() -> None:
        learner.close()
        service.stop()

    return RetrievalSource(service, free, learner)


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
