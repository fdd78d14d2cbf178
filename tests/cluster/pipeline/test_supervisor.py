"""What a supervisor keeps, who gets it and when it ends, over actors that are only names."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

import pytest
from draftline.cluster.pipeline.supervisor import ORPHAN_SECONDS, Holder, Supervisor, Wanted, key_of

FIRST, SECOND = Holder("first", "coordinator-1"), Holder("second", "coordinator-2")


@dataclass
class FakePort:
    """Notes what is started and killed; `dead` are the actors that died by themselves."""

    started: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    cannot_import: bool = False

    def spawn(self, node: str | None = None) -> str:
        self.started.append(f"worker-{len(self.started)}@{node}")
        return self.started[-1]

    def spawn_spare(self, node: str) -> str:
        return self.spawn(node)

    async def prepare(self, spare: str) -> None:
        if self.cannot_import:
            raise ImportError(spare)

    async def is_dead(self, actor: str) -> bool:
        await asyncio.sleep(0)
        return actor in self.dead

    def kill(self, actor: str) -> None:
        self.killed.append(actor)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def port() -> FakePort:
    return FakePort()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def stage(port: FakePort, index: int, node: str | None = None, note: str = "") -> Wanted:
    return Wanted(
        key=key_of("stage", index),
        node=node,
        spawn=partial(port.spawn, node),
        note=note,
        may_be_spare=True,
    )


async def test_a_dead_holders_actors_go_to_its_successor_and_to_nobody_else(
    port: FakePort, clock: Clock
) -> None:
    supervisor = Supervisor(port, "here", 0, clock)
    mine = await supervisor.take(FIRST, stage(port, 0, note="token of the first"))
    assert not mine.is_kept
    # As long as the first lives, another coordinator gets one of its own.
    other = await supervisor.take(SECOND, stage(port, 0))
    assert other.actor != mine.actor
    port.dead.add("coordinator-1")
    assert not (await supervisor.take(SECOND, stage(port, 1))).is_kept
    taken = await supervisor.take(SECOND, stage(port, 0, note="token of the second"))
    assert (taken.actor, taken.is_kept, taken.note) == (mine.actor, True, "token of the first")
    # It is taken now.
    assert not (await supervisor.take(SECOND, stage(port, 0))).is_kept


async def test_two_top_next_tokens_at_once_never_get_the_same_actor(
    port: FakePort, clock: Clock
) -> None:
    supervisor = Supervisor(port, "here", 0, clock)
    await supervisor.take(FIRST, stage(port, 0))
    port.dead.add("coordinator-1")
    takers = (Holder("second", "coordinator-2"), Holder("third", "coordinator-3"))
    taken = await asyncio.gather(*(supervisor.take(one, stage(port, 0)) for one in takers))
    assert [one.is_kept for one in taken] == [True, False]
    assert taken[0].actor != taken[1].actor


@pytest.mark.parametrize(("node", "is_kept"), [(None, True), ("a", True), ("b", False)])
async def test_an_actor_of_another_node_is_not_adopted(
    port: FakePort, clock: Clock, node: str | None, is_kept: bool
) -> None:
    supervisor = Supervisor(port, "here", 0, clock)
    await supervisor.take(FIRST, stage(port, 0, node="a"))
    port.dead.add("coordinator-1")
    assert (await supervisor.take(SECOND, stage(port, 0, node))).is_kept == is_kept


async def test_orphans_end_when_nobody_comes_for_them(port: FakePort, clock: Clock) -> None:
    supervisor = Supervisor(port, "here", 0, clock)
    mine = await supervisor.take(FIRST, stage(port, 0))
    clock.now = 10 * ORPHAN_SECONDS
    await supervisor.tend()
    assert port.killed == []
    port.dead.add("coordinator-1")
    await supervisor.tend()
    clock.now += ORPHAN_SECONDS
    await supervisor.tend()
    assert port.killed == []
    clock.now += 1
    await supervisor.tend()
    assert port.killed == [mine.actor]
    assert not (await supervisor.take(SECOND, stage(port, 0))).is_kept


async def test_spare_workers_are_taken_and_replaced_when_asked(
    port: FakePort, clock: Clock
) -> None:
    supervisor = Supervisor(port, "here", 1, clock)
    supervisor.replenish(2)
    first, second = port.started
    taken = [await supervisor.take(FIRST, stage(port, index)) for index in range(3)]
    assert [one.actor for one in taken][:2] == [first, second]
    assert len(port.started) == 3, "a start beyond the spare ones is a new worker"
    supervisor.replenish()
    supervisor.replenish()
    assert len(port.started) == 4
    port.dead.add(port.started[-1])
    await supervisor.tend()
    assert len(port.started) == 5, "a spare worker that died is replaced"
    supervisor.close()
    assert set(port.started) - set(port.killed) == {port.started[3]}


async def test_a_spare_worker_waits_where_a_stage_was_last_wanted(
    port: FakePort, clock: Clock
) -> None:
    supervisor = Supervisor(port, "here", 1, clock)
    supervisor.replenish()
    taken = await supervisor.take(FIRST, stage(port, 0, node="there"))
    assert taken.actor == "worker-1@there"
    supervisor.replenish()
    assert port.killed == ["worker-0@here"]
    assert (await supervisor.take(FIRST, stage(port, 1, node="there"))).actor == "worker-2@there"


async def test_a_spare_worker_that_cannot_import_is_of_no_use(port: FakePort, clock: Clock) -> None:
    port.cannot_import = True
    supervisor = Supervisor(port, "here", 1, clock)
    supervisor.replenish()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (await supervisor.take(FIRST, stage(port, 0))).actor == port.started[1]


async def test_a_dropped_actor_is_killed_and_never_given_again(
    port: FakePort, clock: Clock
) -> None:
    supervisor = Supervisor(port, "here", 0, clock)
    mine = await supervisor.take(FIRST, stage(port, 0))
    supervisor.drop(mine.actor)
    assert port.killed == [mine.actor]
    port.dead.add("coordinator-1")
    assert not (await supervisor.take(SECOND, stage(port, 0))).is_kept


def test_keys_tell_nothing_and_differ() -> None:
    assert key_of("drafter", "secret") == key_of("drafter", "secret")
    assert key_of("drafter", "secret") != key_of("drafter", "other")
    assert "secret" not in key_of("drafter", "secret")
