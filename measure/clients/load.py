"""Sends requests at a rate or at a concurrency."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain

from ...core.errors import ConfigError
from ...core.progress import Unseen, Work
from ..records.record import Record
from .endpoint import Ask, Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The arrival process of requests.

    concurrency   most requests at once; None: no limit
    request_rate  mean requests a second of a Poisson process; None: as fast as `concurrency` allows
    seed          of the arrival times
    arrivals      seconds of each request in place of a rate
    """

    concurrency: int | None = 1
    request_rate: float | None = None
    seed: int = 0
    arrivals: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError("concurrency", "must be at least 1")
        if self.request_rate is not None and self.request_rate <= 0:
            raise ConfigError("request-rate", "must be above 0 requests a second")

    def starts(self, count: int) -> list[float]:
        """Arrival times of `count` requests, in seconds after the run's start, ascending."""
        if self.arrivals is not None:
            return list(self.arrivals)
        if self.request_rate is None:
            return [0.0] * count
        source, now, times = random.Random(self.seed), 0.0, []
        for _ in range(count):
            times.append(now)
            now += source.expovariate(self.request_rate)
        return times


async def run_load(
    endpoint: Endpoint, asks: Sequence[Ask], load: Load, work: Work | None = None
) -> tuple[list[Record], float]:
    """Records in the order of `asks`, and the seconds until the last one was answered.

    An ask with further turns has a record for each turn; the next turn is sent at once. A request's
    times start when it is sent, after its wait for `concurrency`. Raises `DraftlineError` if any
    request fails, since such a run is invalid. `work` advances by one an ask.
    """
    work = work or Unseen()
    gate = asyncio.Semaphore(load.concurrency) if load.concurrency else nullcontext()
    begin = endpoint.clock()

    async def send(ask: Ask, start: float) -> list[Record]:
        await asyncio.sleep(max(0.0, begin + start - endpoint.clock()))
        async with gate:
            records = await _converse(endpoint, ask)
        work.advance()
        return records

    tasks = [
        asyncio.create_task(send(ask, start))
        for ask, start in zip(asks, load.starts(len(asks)), strict=True)
    ]
    try:
        conversations = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return list(chain.from_iterable(conversations)), endpoint.clock() - begin


async def _converse(endpoint: Endpoint, ask: Ask) -> list[Record]:
    records: list[Record] = []
    while True:
        record = await endpoint.answer(ask)
        said = replace(record, said=ask.prompt, seed=ask.seed, turn=len(records))
        records.append(said)
        if not ask.further_turns:
            return records
        ask = ask.next_turn(record.text)
