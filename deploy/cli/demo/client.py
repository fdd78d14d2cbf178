"""Streams completions from a server and keeps what the demo shows of them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from ....core.errors import DraftlineError

# A first request may wait for every part to warm up on a busy machine.
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class DemoSampling:
    """What every completion of the demo is asked with; a temperature of 0 is greedy."""

    max_tokens: int
    temperature: float
    seed: int


@dataclass(slots=True)
class DemoRun:
    """One completion. `seconds` is from sending the request to its last token."""

    text: str = ""
    num_tokens: int = 0
    seconds: float = 0.0
    tau: float = 1.0
    accepted: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        """Speed as a client sees it."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one token made final, and the source that proposed the token."""

    text: str
    source: str


class DemoClient:
    """A client of one server. Not for several threads."""

    def __init__(self, base_url: str, model: str, sampling: DemoSampling) -> None:
        self._client = httpx.Client(base_url=base_url, timeout=TIMEOUT_S)
        self._body = {
            "model": model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def stream(self, prompt: str, run: DemoRun, *, speculative: bool) -> Iterator[Piece]:
        """Pieces of a completion as they come; fills `run`. Raises `DraftlineError`."""
        options = {"enabled": speculative, "report": True}
        body = self._body | {"prompt": prompt, "speculative": options}
        begin = time.perf_counter()
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise DraftlineError(response.read().decode())
            for event in _events(response):
                if event["choices"]:
                    run.text += event["choices"][0]["text"]
                    run.num_tokens += len(event["draftline"]["token_ids"])
                    run.seconds = time.perf_counter() - begin
                    report = event["draftline"]
                    for text, source in zip(report["texts"], report["sources"], strict=True):
                        yield Piece(text, source)
                else:
                    _read_metrics(event["metrics"]["speculative_decoding"], run)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise DraftlineError(event["error"]["message"])
        yield event


def _read_metrics(block: dict[str, Any], run: DemoRun) -> None:
    run.tau = block["mean_acceptance_length"]
    for source, counts in block["by_source"].items():
        run.accepted[source] += counts["num_accepted_tokens"]
