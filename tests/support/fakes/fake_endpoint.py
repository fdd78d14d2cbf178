"""Answers with fixed tokens, one drafted and one not in each part."""

from __future__ import annotations

import asyncio
import time

from draftline.measure.clients.endpoint import Ask
from draftline.measure.records import Arrival, Record, SpecCounts

ANSWER = (1, 2, 3, 4, 5)


class FakeEndpoint:
    """`wrong` is answered to settings with drafters. Keeps what was asked, and how many at once."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, wrong: tuple[int, ...] = ANSWER) -> None:
        self.asked: list[Ask] = []
        self.most = self._running = 0
        self._wrong = wrong

    async def answer(self, ask: Ask) -> Record:
        self.asked.append(ask)
        self._running += 1
        self.most = max(self.most, self._running)
        await asyncio.sleep(0)
        self._running -= 1
        plain = ask.setting.drafters == ()
        return record(ANSWER if plain else self._wrong, prompt=ask.name, drafted=not plain)


def record(tokens: tuple[int, ...], *, prompt: str = "p", drafted: bool = True) -> Record:
    """The first token after 1 s, then two a second if `drafted`, else one."""
    size = 2 if drafted else 1
    parts = [tokens[:1], *(tokens[at : at + size] for at in range(1, len(tokens), size))]
    sources = ("spectra", "target") if drafted else ("target",)
    steps = len(parts) - 1
    accepted = sum(len(part) == 2 for part in parts[1:])
    return Record(
        prompt=prompt,
        text="".join(map(str, tokens)),
        num_tokens=len(tokens),
        arrivals=tuple(
            Arrival(1.0 + index, part, sources[-len(part) :]) for index, part in enumerate(parts)
        ),
        counts=SpecCounts(
            num_steps=steps,
            committed=len(tokens) - 1,
            drafted={"spectra": 3 * steps} if drafted else {},
            accepted={"spectra": accepted} if drafted else {},
            lengths=(steps - accepted, accepted) if drafted else (steps,),
        ),
    )
