"""Conversations that go on turn by turn, and what a server makes of them."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np

from ....deploy.cli.demo.held_out_prompts import held_out_prompts
from .processes import pids_of

# Letters of a conversation's beginning, and of each turn behind it.
FIRST_LETTERS, TURN_LETTERS = 1500, 200
ANSWER_TOKENS = 12
PIECE_LETTERS = 60


def conversations(count: int, turns: int) -> list[list[dict[str, Any]]]:
    """Bodies of all requests: for each turn those of all conversations, shuffled."""
    rng = Random(0)
    texts = [_text(rng, FIRST_LETTERS + turns * TURN_LETTERS) for _ in range(count)]
    found = []
    for turn in range(1, turns + 1):
        bodies = [
            {
                "prompt": text[: FIRST_LETTERS + turn * TURN_LETTERS],
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0.8,
                "seed": turn,
                "ignore_eos": True,
            }
            for text in texts
        ]
        rng.shuffle(bodies)
        found.append(bodies)
    return found


def _text(rng: Random, letters: int) -> str:
    """Pieces of held-out texts, in an order that no other conversation has."""
    sources = [prompt.text for prompt in held_out_prompts()]
    text = ""
    while len(text) < letters:
        source = rng.choice(sources)
        start = rng.randrange(max(len(source) - PIECE_LETTERS, 1))
        text += source[start : start + PIECE_LETTERS]
    return text[:letters]


@dataclass(slots=True, kw_only=True)
class Totals:
    """What came of a load; tokens as the engines count them, CPU seconds of the replicas."""

    requests: int = 0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    requests_by_replica: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    first_tokens_s: list[float] = field(default_factory=list)

    def first_token_s(self, percentile: float) -> float:
        """A percentile of the times to first tokens."""
        return float(np.percentile(self.first_tokens_s, percentile))


class Load:
    """Sends conversations to a server of this process's own Ray."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def run(self, turns: Sequence[Sequence[dict[str, Any]]], clients: int) -> Totals:
        """Every turn once the one before it has been answered, so many requests at once."""
        totals = Totals()
        async with httpx.AsyncClient(base_url=self._url, timeout=300.0) as client:
            cpu_before = _replicas_cpu_s()
            for bodies in turns:
                waiting = list(reversed(bodies))
                asking = [self._ask_all(client, waiting, totals) for _ in range(clients)]
                await asyncio.gather(*asking)
            totals.cpu_s = _replicas_cpu_s() - cpu_before
            page = (await client.get("/metrics")).raise_for_status().text
        totals.prompt_tokens = sum(_samples(page, "vllm:prefix_cache_queries_total"))
        totals.cached_tokens = sum(_samples(page, "vllm:prefix_cache_hits_total"))
        totals.requests_by_replica = _samples(page, "draftline:tenant_requests_total")
        return totals

    async def _ask_all(
        self, client: httpx.AsyncClient, waiting: list[dict[str, Any]], totals: Totals
    ) -> None:
        while waiting:
            body = waiting.pop() | {"stream": True}
            began = time.perf_counter()
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                lines = answer.aiter_lines()
                await anext(lines)
                totals.first_tokens_s.append(time.perf_counter() - began)
                async for _ in lines:
                    pass
            totals.requests += 1


def _samples(page: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", page, re.MULTILINE)]


def _replicas_cpu_s() -> float:
    """What the engine replicas that run now have computed so far."""
    tick = os.sysconf("SC_CLK_TCK")
    total = 0
    for pid in pids_of("coordinator", os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / tick
