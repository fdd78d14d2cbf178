"""How long the worst permitted requests keep the API's event loop from everybody else.

    python -m draftline.benchmarks.serving.event_loop_stalls [--rounds 3] [--only TEXT]

Serves the demo model in this process and sends one request after the other, each as large as the
limits allow. Beside them a task of the server's loop sleeps for 1 ms again and again: what it
oversleeps is the time for which no other request was looked at. Prints the longest such gap that
every request made, in the median round and over all rounds, and the longest that this process
itself computed for: on a machine with other work the others hold the wait for a processor, too.
Writes JSON.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from rich.console import Console
from rich.table import Table

from ...cluster.config import EngineConfig
from ...cluster.loop_calls import spare_collector
from ...deploy.api.app import create_app
from ...deploy.api.engine_client import LocalEngineClient
from ...deploy.engine.engine import AsyncEngine
from ...deploy.settings.limits import RequestLimits
from ...deploy.settings.settings import ServerConfig
from ...measure.records.record import machine

RESULTS = Path(__file__).parents[1] / "results" / "event_loop_stalls.json"
BEAT_S = 0.001
TIMEOUT_S = 600
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LINE = "def add(left, right):\n    return left + right\n\n\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    name: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one request did: the longest gaps of the loop in all rounds, and the last round."""

    name: str
    body_bytes: int
    status: int
    answer_bytes: int
    seconds: float
    median_gap_ms: float
    longest_gap_ms: float
    longest_own_gap_ms: float


class Heartbeat:
    """The longest time by which a sleep on a loop ended late, since it was last asked."""

    def __init__(self) -> None:
        self._longest_s = self._longest_own_s = 0.0

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            start, computed = time.perf_counter(), time.process_time()
            await asyncio.sleep(BEAT_S)
            gap = time.perf_counter() - start - BEAT_S
            # Whoever keeps the loop waiting computes; all threads of the process count.
            own = min(gap, time.process_time() - computed)
            self._longest_s = max(self._longest_s, gap)
            self._longest_own_s = max(self._longest_own_s, own)

    def take(self) -> tuple[float, float]:
        """Seconds, and those in which this process computed; counts anew from here."""
        longest = self._longest_s, self._longest_own_s
        self._longest_s = self._longest_own_s = 0.0
        return longest


class ServedModel:
    """The demo model behind uvicorn, on a thread and loop of its own. A context manager."""

    def __init__(self, engine: EngineConfig) -> None:
        self.heartbeat = Heartbeat()
        self._engine = engine
        self._ready = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> ServedModel:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def post(self, path: str, body: bytes) -> tuple[int, int]:
        """Status, and bytes of the answer."""
        port = self._listener.getsockname()[1]
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        try:
            client.request("POST", path, body, {"Content-Type": "application/json"})
            response = client.getresponse()
            return response.status, len(response.read())
        finally:
            client.close()

    async def _serve(self) -> None:
        engine = AsyncEngine(self._engine)
        self.context_len = engine.max_model_len
        engine_client = LocalEngineClient(engine)
        app = create_app(engine_client, ServerConfig(), "demo")
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        async with app.router.lifespan_context(app):
            # As a server does.
            spare_collector()
            beating = asyncio.create_task(self.heartbeat.run())
            self._ready.set()
            await self._server.serve(sockets=[self._listener])
            beating.cancel()


def cases(limits: RequestLimits, context: int) -> Iterator[Case]:
    """The worst permitted requests, a plain one first."""
    yield Case("one short prompt", COMPLETIONS, {"prompt": LINE, "max_tokens": 8})
    yield from _prompts(limits, context)
    yield from _chats(limits)
    yield from _log_probs(limits, context)
    yield from _lists(limits)
    yield from _forms(limits)
    yield from _tokens(limits)


def _prompts(limits: RequestLimits, context: int) -> Iterator[Case]:
    # A text that is refused is tokenized, too.
    long = (LINE * (limits.max_prompt_chars // len(LINE) + 1))[: limits.max_prompt_chars]
    each = min(context, limits.max_prompt_chars // limits.max_prompts)
    # What they begin with is computed once: the engine's time is not what is measured.
    prompts = [f"{long[:each]}\n# {index}" for index in range(limits.max_prompts)]
    few = {"max_tokens": 1}
    yield Case("prompts", COMPLETIONS, {"prompt": prompts} | few)
    yield Case("prompts, in a stream", COMPLETIONS, {"prompt": prompts, "stream": True} | few)
    # Refused once it is read, for the engine would take minutes.
    num_prompts = min(limits.max_prompts, (limits.max_json_values - 8) // (context + 2))
    ids = [[1 + index % 99] * context for index in range(num_prompts)]
    yield Case("prompts of token ids", COMPLETIONS, {"prompt": ids} | few)
    yield Case("one long prompt", COMPLETIONS, {"prompt": long} | few)
    yield Case("one long prompt, no words", COMPLETIONS, {"prompt": "a" * len(long)} | few)
    yield Case("as many answers", COMPLETIONS, {"prompt": LINE, "n": limits.max_answers} | few)


def _chats(limits: RequestLimits) -> Iterator[Case]:
    messages = [{"role": "user", "content": "hi"}] * limits.max_messages
    yield Case("messages", CHAT, {"messages": messages})
    part = {"type": "text", "text": "hi"}
    parts = [{"role": "user", "content": [part] * limits.max_content_parts}]
    yield Case("parts of a message", CHAT, {"messages": parts})


def _log_probs(limits: RequestLimits, context: int) -> Iterator[Case]:
    room = limits.max_logprob_entries // 21
    num_prompts = max(1, room // (context - 64))
    ids = [[2 + index] * min(context - 64, room // num_prompts) for index in range(num_prompts)]
    fields = {"prompt": ids, "max_tokens": 1}
    yield Case("echo and logprobs", COMPLETIONS, fields | {"echo": True, "logprobs": 20})
    streamed = fields | {"echo": True, "logprobs": 20, "stream": True}
    yield Case("echo and logprobs, in a stream", COMPLETIONS, streamed)
    yield Case("prompt_logprobs", COMPLETIONS, fields | {"prompt_logprobs": 20})
    many = {"prompt": LINE, "n": min(64, limits.max_answers), "max_tokens": 64, "logprobs": 20}
    yield Case("answers and logprobs", COMPLETIONS, many)
    chat = {"messages": [{"role": "user", "content": "hi"}], "n": many["n"], "max_tokens": 64}
    probs = {"logprobs": True, "top_logprobs": 20}
    yield Case("chat answers and logprobs", CHAT, chat | probs)
    yield Case("answers and their sources", COMPLETIONS, many | {"speculative": {"report": True}})


def _lists(limits: RequestLimits) -> Iterator[Case]:
    few = {"prompt": LINE, "max_tokens": 1, "n": limits.max_answers}
    ids = [index % 900 for index in range(limits.max_listed_tokens)]
    listed = {"stop_token_ids": ids, "allowed_token_ids": ids, "banned_token_ids": ids[:800]}
    bias = {str(index): 0.5 for index in range(min(limits.max_logit_biases, 900))}
    yield Case("lists of tokens", COMPLETIONS, few | listed | {"logit_bias": bias})
    chars = limits.max_stop_chars_total // limits.max_stop_texts
    stop = [" " * (chars - index) + "x" for index in range(1, limits.max_stop_texts + 1)]
    yield Case("stop texts", COMPLETIONS, {"prompt": LINE, "max_tokens": 64, "stop": stop})
    nested = [[{"a": {}}] for _ in range(limits.max_json_values // 4 - 8)]
    yield Case("JSON without a meaning", COMPLETIONS, {"prompt": LINE, "metadata": nested})
    keys = {f"key {index}": {"a": 1} for index in range(limits.max_json_values // 4 - 8)}
    yield Case("JSON of many keys", COMPLETIONS, {"prompt": LINE, "metadata": keys})
    yield Case("a field with a long name", COMPLETIONS, {"prompt": LINE, "m" * 3_000_000: 1})


def _forms(limits: RequestLimits) -> Iterator[Case]:
    few: dict[str, Any] = {"prompt": LINE, "max_tokens": 4}
    choice = [f"{index} " * 8 for index in range(limits.max_choices)]
    fields = [f"field_{index}" for index in range(limits.max_grammar_bytes // 48)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in fields}}
    words = [f"word{index}" for index in range(limits.max_grammar_bytes // 12)]
    rules = " | ".join(json.dumps(word) for word in words[:900])
    forms = {
        "choice": choice,
        "json": schema | {"required": fields},
        "regex": f"({'|'.join(words)})",
        "grammar": f"start: {rules}",
    }
    for name, form in forms.items():
        yield Case(f"a {name}", COMPLETIONS, few | {"structured_outputs": {name: form}})


def _tokens(limits: RequestLimits) -> Iterator[Case]:
    text = (LINE * (limits.max_prompt_chars // len(LINE) + 1))[: limits.max_prompt_chars]
    yield Case("tokenize", "/tokenize", {"prompt": text, "return_token_strs": True})
    ids = [index % 900 for index in range(limits.max_detokenize_tokens)]
    yield Case("detokenize", "/detokenize", {"tokens": ids})


def measure(served: ServedModel, case: Case, rounds: int) -> Row:
    """Send one case several times."""
    body = json.dumps(case.body).encode()
    status, size, seconds = 0, 0, 0.0
    gaps, own_gaps = [], []
    for _ in range(rounds):
        # The gap that the writing of the body made ends a beat later.
        time.sleep(0.05)
        served.heartbeat.take()
        start = time.perf_counter()
        status, size = served.post(case.path, body)
        # A gap is known when it has ended.
        time.sleep(0.05)
        seconds = time.perf_counter() - start - 0.05
        gap, own = served.heartbeat.take()
        gaps.append(gap)
        own_gaps.append(own)
    return Row(
        name=case.name,
        body_bytes=len(body),
        status=status,
        answer_bytes=size,
        seconds=round(seconds, 2),
        median_gap_ms=round(1e3 * statistics.median(gaps), 1),
        longest_gap_ms=round(1e3 * max(gaps), 1),
        longest_own_gap_ms=round(1e3 * max(own_gaps), 1),
    )


def _shown(rows: list[Row]) -> Table:
    gaps = ("median gap (ms)", "longest", "own")
    table = Table("request", "sent", "status", "answer", "seconds", *gaps)
    for row in rows:
        table.add_row(*(str(value) for value in asdict(row).values()))
    return table


def main(
    *,
    rounds: Annotated[int, typer.Option(help="Times that every request is sent.")] = 2,
    only: Annotated[str, typer.Option(help="Requests whose names have this text.")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file; none: not written.")] = RESULTS,
) -> None:
    """Measure and print."""
    console = Console()
    limits = RequestLimits()
    with ServedModel(EngineConfig(model="demo")) as served:
        context = served.context_len
        rows = []
        for case in cases(limits, context):
            if only not in case.name:
                continue
            rows.append(measure(served, case, rounds))
            console.print(json.dumps(asdict(rows[-1])), soft_wrap=True)
    console.print(_shown(rows))
    if out is not None:
        result = {
            "machine": asdict(machine()),
            "rounds": rounds,
            "rows": [asdict(row) for row in rows],
        }
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
