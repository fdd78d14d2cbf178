"""Lookups spread over several replicas of a retrieval server."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ...core.arrays import Int32
from ...core.errors import CapacityError, DrafterError
from ...core.interfaces import Subtree, empty_subtree
from ..links.failures import CircuitBreaker, RetryPolicy

# A restart takes seconds; a replica that is tried in vain takes a part of the others' time.
RETRY = RetryPolicy(tolerated=0, first_delay_s=0.2, max_delay_s=5.0)


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
        """As `Lookup.lookup`. Raises `DrafterError`, or `CapacityError` if it has no time."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


_Entry = tuple[Replica, CircuitBreaker]


class ReplicatedLookup:
    """Implements `core.interfaces.Lookup` over replicas that serve the same store.

    timeout_s  for the answer to one batch, in seconds, whoever gives it
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
                    found = replica.lookup(contexts, namespaces, max_nodes, timeout_s=share)
                except CapacityError:
                    is_refused = True
                    breaker.succeed()
                except DrafterError as error:
                    failure = error
                    breaker.fail(self._clock())
                else:
                    breaker.succeed()
                    return found
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
