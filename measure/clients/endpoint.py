"""Requests of a measurement, and the endpoints that answer them: an engine in this process, or a
server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ..records.record import Record, Said
from .setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    prompt         a text, or messages for the model's chat template
    setting        the drafters that may propose for it
    salt           requests with different salts share no cached prefix
    further_turns  the user's next messages, each after an answer
    """

    name: str
    prompt: Said
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
            prompt: Said = f"{self.prompt}{answer}\n\n{turn}\n"
        else:
            said = ("assistant", answer), ("user", turn)
            prompt = (*self.prompt, *({"role": role, "content": text} for role, text in said))
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


def said_of(text: str, *, is_chat: bool) -> Said:
    """A prompt as a text, or as what a user says."""
    return ({"role": "user", "content": text},) if is_chat else text
