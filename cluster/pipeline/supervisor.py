"""Keeps actors alive beyond the coordinator that uses them, with spare workers beside them.

It decides which actors are kept, which coordinator may have one, and when one ends. `ActorPort` is
its only contact with Ray.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)

# A replica that Ray Serve replaces is back far sooner. No coordinator takes older orphans.
ORPHAN_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Holder:
    """A coordinator. Without an `actor` it lives as long as the supervisor."""

    id: str
    actor: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An actor that a coordinator needs.

    key        all that the actor depends on: one that was started for an equal key will do
    node       id of the Ray node where it must run; None: anywhere
    spawn      starts a new one; picklable
    note       what its next holder must know of it
    may_be_spare  whether a worker that waits without a stage will do
    """

    key: str
    node: str | None
    spawn: Callable[[], Any]
    note: Any = None
    may_be_spare: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """An actor that a coordinator has now.

    is_kept  another coordinator, which is dead, had it before
    note     of the one for whom it was started
    """

    actor: Any
    is_kept: bool
    note: Any = None


def key_of(kind: str, *values: object) -> str:
    """A key of all that an actor depends on, which does not reveal it."""
    return f"{kind}-{hashlib.sha256(repr(values).encode()).hexdigest()[:16]}"


class ActorPort(Protocol):
    """The supervisor's interface to Ray."""

    def spawn_spare(self, node: str) -> Any:
        """Start a worker without a stage on this Ray node."""
        ...

    async def prepare(self, spare: Any) -> None:
        """Wait until its imports are done. Raises the error of a worker that failed."""
        ...

    async def is_dead(self, actor: Any) -> bool:
        """Whether it is known to be dead: a process that is only slow or stopped lives."""
        ...

    def kill(self, actor: Any) -> None:
        """End its process at once."""
        ...


@dataclass(slots=True)
class _Kept:
    actor: Any
    key: str
    node: str | None
    holder: Holder
    note: Any
    orphan_since: float | None = None


@dataclass(frozen=True, slots=True)
class _Spare:
    actor: Any
    node: str
    # Done when its imports are.
    ready: asyncio.Future[None]


class Supervisor:
    """The actors of the coordinators of one deployment. Used on one event loop.

    node        where spare workers wait until some stage is wanted elsewhere
    num_spares  how many workers wait without a stage
    clock       seconds; only differences count
    """

    def __init__(
        self, port: ActorPort, node: str, num_spares: int, clock: Callable[[], float]
    ) -> None:
        self._port = port
        self._node = node
        self._num_spares = num_spares
        self._clock = clock
        self._kept: list[_Kept] = []
        self._spares: list[_Spare] = []
        # Two coordinators must never get the same actor.
        self._taking = asyncio.Lock()

    async def take(self, holder: Holder, wanted: Wanted) -> Taken:
        """An actor for `holder` alone: an orphan of an equal key, a spare worker or a new one."""
        async with self._taking:
            await self._find_orphans()
            for kept in self._kept:
                if kept.orphan_since is not None and _fits(kept, wanted):
                    kept.holder, kept.orphan_since = holder, None
                    return Taken(kept.actor, is_kept=True, note=kept.note)
            actor = self._take_spare(wanted) if wanted.may_be_spare else None
            if actor is None:
                actor = wanted.spawn()
            self._kept.append(_Kept(actor, wanted.key, wanted.node, holder, wanted.note))
            return Taken(actor, is_kept=False, note=wanted.note)

    def drop(self, actor: Any) -> None:
        """End an actor that its holder does not want any more."""
        self._kept = [kept for kept in self._kept if kept.actor != actor]
        self._port.kill(actor)

    def replenish(self, num_spares: int = 0) -> None:
        """Have enough spare workers, or `num_spares`, where one was last wanted; does not wait."""
        most = max(num_spares, self._num_spares)
        good = [
            spare for spare in self._spares if spare.node == self._node and not _has_failed(spare)
        ]
        spares, self._spares = self._spares, good[:most]
        for spare in spares:
            if spare not in self._spares:
                self._port.kill(spare.actor)
        while len(self._spares) < most:
            actor = self._port.spawn_spare(self._node)
            ready = asyncio.ensure_future(self._port.prepare(actor))
            self._spares.append(_Spare(actor, self._node, ready))

    async def tend(self) -> None:
        """End what has had no living holder for too long; replace spare workers that died."""
        async with self._taking:
            await self._find_orphans()
            now = self._clock()
            for kept in list(self._kept):
                since = kept.orphan_since
                if since is not None and now - since > ORPHAN_SECONDS:
                    logger.info("event=orphan_ended key=%s", kept.key)
                    self.drop(kept.actor)
            spares = list(self._spares)
            gone = await asyncio.gather(*(self._port.is_dead(spare.actor) for spare in spares))
            for spare, is_gone in zip(spares, gone, strict=True):
                if is_gone and spare in self._spares:
                    self._spares.remove(spare)
                    self.replenish(len(self._spares) + 1)

    def close(self) -> None:
        """End all actors, spare ones too; twice is once."""
        spares, self._spares = self._spares, []
        for spare in spares:
            spare.ready.cancel()
            self._port.kill(spare.actor)
        for kept in list(self._kept):
            self.drop(kept.actor)

    async def _find_orphans(self) -> None:
        holders = {
            kept.holder.id: kept.holder.actor
            for kept in self._kept
            if kept.orphan_since is None and kept.holder.actor is not None
        }
        answers = await asyncio.gather(*map(self._port.is_dead, holders.values()))
        dead = {name for name, is_dead in zip(holders, answers, strict=True) if is_dead}
        for kept in self._kept:
            if kept.orphan_since is None and kept.holder.id in dead:
                kept.orphan_since = self._clock()

    def _take_spare(self, wanted: Wanted) -> Any:
        self._node = wanted.node or self._node
        # One that still imports is ahead of a new one.
        for spare in sorted(self._spares, key=lambda spare: spare.ready.done(), reverse=True):
            if not _has_failed(spare) and wanted.node in (None, spare.node):
                self._spares.remove(spare)
                return spare.actor
        return None


def _fits(kept: _Kept, wanted: Wanted) -> bool:
    return kept.key == wanted.key and wanted.node in (None, kept.node)


def _has_failed(spare: _Spare) -> bool:
    future = spare.ready
    return future.done() and (future.cancelled() or future.exception() is not None)
