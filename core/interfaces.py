"""What the engine needs of the parts around it: pipelines, drafters, learners and lookups."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from .arrays import Float32, Int32
from .proposals import (
    Commit,
    DraftCost,
    Drafted,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    Proposal,
    Query,
    StepCommit,
)
from .steps import StepInput, StepOutput


@dataclass(frozen=True, slots=True, eq=False)
class Subtree:
    """Stored continuations of one context, below its last token.

    tokens     int32 [n]    target token ids
    parents    int32 [n]    index of the parent node, always smaller than the own index; -1 is the
                            context's last token
    log_probs  float32 [n]  natural log of each node's probability given its parent, at most 0
    match_len  how many of the context's last tokens were matched; 0 if none, with no nodes

    A child's path probability (the sum of log-probabilities from the root) is never above its
    parent's, and a lookup returns the nodes of the highest path probability, best first.
    """

    tokens: Int32
    parents: Int32
    log_probs: Float32
    match_len: int


class StageMemory(NamedTuple):
    """Bytes that a stage keeps of its target.

    weights  as they are kept, without those of heads
    kv       of the cache, with that of heads
    states   of layers that keep any: of running requests, snapshots, and rows of trees
    """

    weights: int
    kv: int
    states: int = 0


class Lookup(Protocol):
    """Finds continuations by the longest stored suffix of a context."""

    def lookup(
        self, contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
    ) -> list[Subtree]:
        """One subtree a context, in order, of at most `max_nodes` nodes each.

        contexts: int32 [at most 16], the last tokens of each text, oldest first. `namespaces`
        names whose data each may read besides `shared`. Pure: the same stored data and arguments
        give the same subtrees. Raises `StoreError` or `DrafterError` when it has none to give.
        """
        ...


def empty_subtree() -> Subtree:
    """The subtree of a context that is not stored."""
    none = np.empty(0, dtype=np.int32)
    return Subtree(none, none, np.empty(0, dtype=np.float32), 0)


# What becomes of an ended request. It is `learned`, or `repeated`: known as a whole already. Or it
# is refused: `shared` is everybody's, `salted` has a cache salt, `unstored` has store: false, `off`
# is of a namespace that is not learned, `unfit` of another length or vocabulary. Or it is lost:
# `dropped` where too many waited, `failed` with its store.
OUTCOMES = (
    "learned", "repeated", "shared", "salted", "unstored", "off", "unfit", "dropped", "failed",
)  # fmt: skip
# Counted beside them: texts that gained weight, because an ended request took what they say.
CREDITED = "credited"
# And entries of the store's logs that were passed over because they are damaged.
DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """The end of a prompt and the answer to it.

    namespace  whose text it is; only lookups of this namespace may ever read it
    tokens     int32 [n]  the prompt's last tokens and the answer's
    accepted   (start, stop) in `tokens`: runs that the store had proposed and the target took
    """

    namespace: str
    tokens: Int32
    accepted: tuple[tuple[int, int], ...] = ()


class Learner(Protocol):
    """Takes ended requests; never blocks and raises nothing."""

    @property
    def counts(self) -> Mapping[str, int]:
        """How many had which of `OUTCOMES` so far, `CREDITED` and `DAMAGED`; what is 0 may be left
        out."""
        ...

    def learn(self, ended: Ended) -> None:
        """Take it, or drop it and count that."""
        ...


@runtime_checkable
class LearningDrafter(Protocol):
    """A drafter that hands ended requests to a learner."""

    @property
    def learning_counts(self) -> Mapping[str, int]:
        """As `Learner.counts`, with what it refused by itself; empty where it learns nothing. May
        be read in another thread."""
        ...


class Drafter(Protocol):
    """Proposes continuations of requests. State is keyed by request id; what is learned from one
    request may serve others, but only those of its namespace and cache salt.

    One thread calls a drafter at a time. A drafter may be wrong or slow and only ever costs
    speed; what it raises ends its own reply, never a request.
    """

    @property
    def name(self) -> str:
        """The `source` of its proposals, unique in an engine."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Approximate bytes kept for open and of ended requests.

        A model's weights and KV cache, which never grow, do not count. Called now and then, so it
        must be cheap."""
        ...

    def open(self, request: DraftRequest) -> None:
        """Begin a request, or replace its state when it is known already."""
        ...

    def propose(
        self, queries: Sequence[Query], deadline: float | None = None
    ) -> Sequence[Proposal]:
        """One proposal a query, in order; empty where there is nothing to say.

        `deadline` is in seconds of the hub's clock, for drafters that can stop early. Does not
        change what later proposals of the same committed text would be.
        Raises `DrafterError` if a query does not fit the state (unknown id, other length).
        """
        ...

    def observe(self, commits: Sequence[Commit]) -> None:
        """Learn what was committed, in order, before the next `propose` of those requests."""
        ...

    def close(self, request_id: str) -> None:
        """Forget a request; an unknown id is ignored."""
        ...


@runtime_checkable
class FeatureDrafter(Protocol):
    """A drafter that goes on from the target's hidden states."""

    @property
    def feature_layers(self) -> FeatureLayers:
        """Layers that it reads: what it is given has no others, and these in this order."""
        ...

    def observe_features(self, rows: Sequence[FeatureRows]) -> None:
        """Take features of open requests, each in the order of positions, before their commits.

        Some may be missing, where none were wanted. Some may come again, where a request's KV was
        computed again.
        """
        ...


@runtime_checkable
class AheadDrafter(Protocol):
    """A drafter that stands for a head of the last stage, which drafts for the next step."""

    def take(self, request_id: str, committed_len: int, proposal: Proposal) -> None:
        """Keep what was drafted behind a request's first tokens."""
        ...

    def close(self, request_id: str) -> None:
        """Forget a request; an unknown id is ignored."""
        ...


class PrefixCounts(NamedTuple):
    """Tokens of texts that began to be cached, and how many of them were in the cache already."""

    queries: int = 0
    hits: int = 0


@runtime_checkable
class CachingDrafter(Protocol):
    """A drafter whose requests share the KV of what their texts begin with."""

    @property
    def prefix_counts(self) -> PrefixCounts:
        """Totals so far. May be read in another thread."""
        ...


@runtime_checkable
class OwningDrafter(Protocol):
    """A drafter that holds threads or connections."""

    def free(self) -> None:
        """Finish what waits, then end threads and close connections. The drafter is spent then."""
        ...


class StepPipeline(Protocol):
    """The part of a pipeline that the engine uses (`cluster/transport/stage_spec.py`)."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be submitted and not finished yet."""
        ...

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """Send a step; raises, or its awaitable does, `StageError` or `StageLost`."""
        ...


class ProposalSource(Protocol):
    """The engine's only access to drafters (`cluster/drafting/hub.py`). Never raises."""

    def open(self, request: DraftRequest, at_once: Collection[str] | None = None) -> None:
        """Begin a request. Drafters of other processes receive it now if they are in
        `at_once`, all by default; the others when they are first asked for it."""
        ...

    def close(self, request_id: str, last: Sequence[StepCommit] = ()) -> None:
        """End a request with every drafter that knows it, after its `last` commits."""
        ...

    async def exchange(
        self,
        commits: Sequence[StepCommit],
        queries: Sequence[Query],
        asked: Mapping[str, Collection[str]] | None = None,
    ) -> Mapping[str, Sequence[Proposal]]:
        """Take what was committed, ask for proposals; by request id, in order of priority.

        asked  ids of the requests that each drafter is asked for, by name; None: each for all.
               A drafter that is not asked receives no message; when it is asked again, it receives
               all that it missed
        """
        ...

    def costs(self) -> Mapping[str, DraftCost]:
        """Seconds that each drafter takes, by name; of those that may be asked still."""
        ...

    @property
    def feature_drafters(self) -> frozenset[str]:
        """Names of the drafters that go on from the target's features."""
        ...

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features for the next message to those."""
        ...

    @property
    def stage_heads(self) -> tuple[str, ...]:
        """Names of the drafters that are heads of the last stage; of those in use still."""
        ...

    def note_drafted(self, drafted: Sequence[Drafted]) -> None:
        """Keep what those drafted, for the next queries."""
        ...

    @property
    def remote(self) -> frozenset[str]:
        """Names of the drafters of other processes, which `exchange` waits for."""
        ...
