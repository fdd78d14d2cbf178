"""The client's measurements of one request, and the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from .spec_counts import SpecCounts

# No pass of a model is faster: parts that arrive closer together were sent together.
SAME_ARRIVAL_S = 2e-4
# A text, or a chat's messages with their `role` and `content`.
Said = str | tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """The processor and the relevant versions."""

    processor: str
    cores: int
    python: str
    torch: str
    transformers: str

    def line(self) -> str:
        """A line for display."""
        return (
            f"{self.processor}, {self.cores} cores; Python {self.python}, torch {self.torch}, "
            f"transformers {self.transformers}"
        )

    def fields(self) -> dict[str, object]:
        """The facts by name, for JSON."""
        return asdict(self)


def machine() -> MachineRecord:
    """This machine."""
    return MachineRecord(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        python=platform.python_version(),
        torch=version("torch"),
        transformers=version("transformers"),
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A part of an answer.

    seconds    since its request was sent
    token_ids  None if the server does not report it
    sources    parallel to token_ids; empty if the server does not report it
    """

    seconds: float
    token_ids: tuple[int, ...] | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Record:
    """One answered request. Times are in seconds, and as vLLM's benchmark defines them.

    arrivals    at least one
    num_tokens  of the answer, as the server counts them
    counts      None if the server does not report it
    num_prompt_tokens  None if the server does not report it
    said, seed  the prompt, and the seed of its sampling
    turn        of its conversation, from 0
    """

    prompt: str
    text: str
    num_tokens: int
    arrivals: tuple[Arrival, ...]
    counts: SpecCounts | None = None
    num_prompt_tokens: int | None = None
    said: Said = ""
    seed: int | None = 0
    turn: int = 0

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0].seconds

    @property
    def e2el(self) -> float:
        """End-to-end latency: until the last token."""
        return self.arrivals[-1].seconds

    @property
    def tpot(self) -> float | None:
        """Time per output token without the first; None for an answer of one token."""
        if self.num_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: gaps between arrivals, each of one token or more."""
        return [late.seconds - early.seconds for early, late in pairwise(self.arrivals)]

    @cached_property
    def token_ids(self) -> tuple[int, ...] | None:
        """The whole answer; None if the server does not report it."""
        parts = [arrival.token_ids for arrival in self.arrivals]
        known = [part for part in parts if part is not None]
        return sum(known, ()) if len(known) == len(parts) else None

    @property
    def step_rates(self) -> list[float]:
        """Tokens a second of every step after the first arrival; empty without token ids.

        Arrivals that the client read together are one step.
        """
        if self.token_ids is None:
            return []
        rates, begin, tokens = [], self.arrivals[0].seconds, 0
        for arrival in self.arrivals[1:]:
            tokens += len(arrival.token_ids or ())
            gap = arrival.seconds - begin
            if gap >= SAME_ARRIVAL_S and tokens:
                rates.append(tokens / gap)
                begin, tokens = arrival.seconds, 0
        return rates
