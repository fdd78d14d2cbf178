"""Requests of a measurement, and what answers them: an engine in this process, or a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..records.record import Record
from .setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    setting  who may propose drafts for it
    salt     requests of another salt share no computed prefix with it
    """

    name: str
    prompt: str
    setting: Setting
    max_tokens: int
    temperature: float
    seed: int
    top_p: float = 1.0
    ignore_eos: bool = True
    max_nodes: int | None = None
    salt: str = ""


class Endpoint(Protocol):
    """A source of answers to requests, many at once: an engine in this process, or a server."""

    async def answer(self, ask: Ask) -> Record:
        """Send a request and read its whole stream. Raises `DraftlineError`."""
        ...
