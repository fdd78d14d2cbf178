"""Requests of a measurement, the endpoints that answer them, and how requests arrive."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from ...core.errors import ConfigError
from ...core.progress import Unseen, Work
from ..records import PromptInput, Record

TARGET_ONLY = "target"
ALL = "all"


@dataclass(frozen=True, slots=True)
class Setting:
    """The options that may differ between runs of the same requests.

    drafters   the allowed drafters; empty is plain decoding, None leaves the choice to the server
    is_ordered trees are filled in the order of drafters (`node_budget: ordered`)
    acceptance its acceptance rule, if not the engine's
    draft_length  most tokens of a path of its one drafter, where kappa is to be reported
    """

    name: str
    drafters: tuple[str, ...] | None
    is_ordered: bool = False
    acceptance: str | None = None
    draft_length: int | None = None


def matched_settings(known: Sequence[str], chosen: str | None) -> list[Setting]:
    """Settings to compare: the target alone first, then what `chosen` lists.

    known   names of the drafters there are
    chosen  comma-separated names, `+` joins several, `all` means all; None: each alone, and all

    Raises `ConfigError` for an unknown drafter.
    """
    settings = [Setting(TARGET_ONLY, ())]
    if chosen is None:
        settings += [Setting(name, (name,)) for name in known]
        return settings if len(known) < 2 else [*settings, Setting(ALL, tuple(known))]
    for name in filter(None, (part.strip() for part in chosen.split(","))):
        drafters = tuple(known) if name == ALL else tuple(name.split("+"))
        for drafter in drafters:
            if drafter not in known:
                raise ConfigError(
                    "drafters", f"{drafter!r} is not there; known: {', '.join(known) or 'none'}"
                )
        settings.append(Setting(name, drafters))
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    prompt         a text, or messages for the model's chat template
    setting        the drafters that may propose for it
    salt           requests with different salts share no cached prefix
    further_turns  the user's next messages, each after an answer
    """

    name: str
    prompt: PromptInput
    setting: Setting
    max_tokens: int
    temperature: float
    seed: int | None
    top_p: float = 1.0
    ignore_eos: bool = True
    max_nodes: int | None = None
    salt: str = ""
    further_turns: tuple[str, ...] = ()

    def next_turn(self, answer: str) -> Ask:
        """The request for the next turn, after this one's answer; there must be a further turn."""
        turn, *others = self.further_turns
        if isinstance(self.prompt, str):
            prompt: PromptInput = f"{self.prompt}{answer}\n\n{turn}\n"
        else:
            messages = ("assistant", answer), ("user", turn)
            prompt = (*self.prompt, *({"role": role, "content": text} for role, text in messages))
        return replace(self, prompt=prompt, further_turns=tuple(others))


class Endpoint(Protocol):
    """A source of answers to requests, many at once: an engine in this process, or a server."""

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of its answers, in seconds."""
        ...

    async def answer(self, ask: Ask) -> Record:
        """Send a request and read its whole stream. Raises `DraftlineError`."""
        ...


class DrawingEndpoint(Endpoint, Protocol):
    """An endpoint that also reports the probabilities of the most probable first tokens."""

    async def first_token(self, ask: Ask, num_top: int) -> tuple[str, Mapping[str, float]]:
        """The first token of an answer, and the probabilities of the `num_top` most probable ones.

        Tokens are identified by text or id. Without log-probabilities the mapping is empty.
        """
        ...


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
        record = replace(record, prompt_input=ask.prompt, seed=ask.seed, turn=len(records))
        records.append(record)
        if not ask.further_turns:
            return records
        ask = ask.next_turn(record.text)
