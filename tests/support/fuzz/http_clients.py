"""The clients of a fuzz run: cases, and steady streams whose texts must not change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx
from draftline.deploy.cli.demo.prompts import held_out_prompts
from support.fuzz.http_cases import Case, FuzzRequest, Garbage

# What the server says with a 503 that is no fault: it is full, or on its way out.
FULL = ("all of them busy", "shutting down")
# Longer than anything here may take on a busy machine: then the server hangs.
ANSWER_TIMEOUT_S = 60.0
# A raw connection without an answer may rightly have none; its client leaves.
RAW_PATIENCE_S = 0.4
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed", "message_stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzOutcome:
    """What came of a case.

    status  of the answer; 0: none, since the client left
    fault   what the server did wrong; empty: nothing
    begun   on the clock of `time.monotonic`, as `ended`
    """

    case: Case
    status: int
    fault: str
    begun: float
    ended: float


async def send(client: httpx.AsyncClient, case: Case) -> FuzzOutcome:
    """Send one case and look at the answer."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    status, fault = 0, ""
    if isinstance(case, Garbage):
        status, fault = await _send_raw(client.base_url, case)
    else:
        try:
            async with asyncio.timeout(case.leave_s):
                status, fault = await _post(client, case)
        except httpx.TimeoutException:
            fault = f"no answer within {ANSWER_TIMEOUT_S:g} s"
        except httpx.HTTPError as error:
            fault = f"the connection broke: {type(error).__name__}"
        except TimeoutError:
            # The client has left, as it wanted to.
            pass
    return FuzzOutcome(case=case, status=status, fault=fault, begun=begun, ended=loop.time())


async def _post(client: httpx.AsyncClient, case: FuzzRequest) -> tuple[int, str]:
    headers = {"content-type": "application/json"}
    async with client.stream("POST", case.path, content=case.body, headers=headers) as response:
        status = response.status_code
        if status != HTTPStatus.OK:
            return status, error_fault(status, await response.aread())
        if response.headers["content-type"].startswith("text/event-stream"):
            return status, await stream_fault(response.aiter_lines(), case.leave_after)
        return status, _json_fault(await response.aread())


def error_fault(status: int, body: bytes) -> str:
    """What is wrong with an error's answer."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{status} without an error in its body"
    if not isinstance(message, str) or not message:
        return f"{status} without a message"
    return _status_fault(status, message)


def _status_fault(status: int, message: str) -> str:
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return ""
    is_full = status == HTTPStatus.SERVICE_UNAVAILABLE and any(one in message for one in FULL)
    return "" if is_full else f"{status}: {message[:200]}"


def _json_fault(body: bytes) -> str:
    try:
        json.loads(body, parse_constant=_refuse_constant)
    except ValueError as error:
        return f"an answer that is no JSON: {str(error)[:80]}"
    return ""


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


async def stream_fault(lines: AsyncIterator[str], leave_after: int | None) -> str:
    """What is wrong with a stream's events; the client leaves after some of them."""
    count, last = 0, ""
    async for line in lines:
        if leave_after is not None and count >= leave_after:
            return ""
        if not line.startswith("data: "):
            continue
        count += 1
        last = line.removeprefix("data: ")
        if last == "[DONE]":
            return ""
        if fault := _event_fault(last):
            return fault
    return "" if _is_end(last) else "a stream without an end"


def _event_fault(data: str) -> str:
    if fault := _json_fault(data.encode()):
        return f"an event: {fault}"
    error = _error_of(json.loads(data))
    if error is None:
        return ""
    code = error.get("code")
    message = str(error.get("message"))
    return _status_fault(code, message) if isinstance(code, int) else ""


def _is_end(data: str) -> bool:
    if not data:
        return False
    event = json.loads(data)
    return _error_of(event) is not None or event.get("type") in LAST_EVENTS


def _error_of(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    response = event.get("response")
    if event.get("type") == "error":
        return event
    error = event.get("error") or (response.get("error") if isinstance(response, dict) else None)
    return error if isinstance(error, dict) else None


async def _send_raw(url: httpx.URL, case: Garbage) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        # The server may close first, at any time.
        with suppress(OSError):
            for piece in case.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(case.pause_s)
            if case.is_shut:
                writer.write_eof()
        answer = await _read(reader) if case.is_read else b""
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return raw_fault(answer)


async def _read(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes, or says nothing for a while."""
    answer = bytearray()
    with suppress(TimeoutError, OSError):
        while piece := await asyncio.wait_for(reader.read(65536), RAW_PATIENCE_S):
            answer += piece
    return bytes(answer)


def raw_fault(answer: bytes) -> tuple[int, str]:
    """The first status of what was answered, and the first fault of all answers."""
    statuses = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        parts = head.split(b" ", 2)
        if not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            return (statuses or [0])[0], "an answer that is no HTTP"
        status = int(parts[1])
        statuses.append(status)
        size = _length(head)
        body, answer = rest[:size], rest[size:]
        is_whole = len(body) == size
        if status >= HTTPStatus.BAD_REQUEST and is_whole and (fault := error_fault(status, body)):
            return status, fault
        if not is_whole:
            break
    return (statuses or [0])[0], ""


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


STREAMS = 8
TOKENS = 48
RETRY_S = 0.1
BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


def steady_bodies() -> list[dict[str, Any]]:
    """Half of them greedy, half seeded."""
    return [
        {
            "model": "demo",
            "prompt": prompt.text,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "truncate_prompt_tokens": 64,
            "temperature": 0.0 if index % 2 == 0 else 0.8,
            "seed": index,
        }
        for index, prompt in enumerate(held_out_prompts(STREAMS))
    ]


class SteadyStreams:
    """Streams one after the other, as many at once as there are bodies.

    expected  the text of each body
    """

    def __init__(self, bodies: Sequence[Mapping[str, Any]], expected: Sequence[str]) -> None:
        self._pairs = list(zip(bodies, expected, strict=True))
        self.num_streams = 0
        self.num_refused = 0
        self.faults: list[str] = []

    async def run(self, client: httpx.AsyncClient, stop: asyncio.Event) -> None:
        """Until `stop` is set; each stream runs at least once, and to its end."""
        await asyncio.gather(
            *(
                self._repeat(client, index, body, text, stop)
                for index, (body, text) in enumerate(self._pairs)
            )
        )

    async def _repeat(
        self,
        client: httpx.AsyncClient,
        index: int,
        body: Mapping[str, Any],
        expected: str,
        stop: asyncio.Event,
    ) -> None:
        is_first = True
        while is_first or not stop.is_set():
            text = await self._stream(client, index, body)
            if text is None:
                await asyncio.sleep(RETRY_S)
                continue
            is_first = False
            self.num_streams += 1
            if text != expected:
                self.faults.append(f"stream {index}: {text!r} instead of {expected!r}")

    async def _stream(
        self, client: httpx.AsyncClient, index: int, body: Mapping[str, Any]
    ) -> str | None:
        """The text; None: the server was full."""
        text, is_done = "", False
        try:
            async with client.stream(
                "POST", "/v1/completions", json={**body, **STREAMED}
            ) as response:
                if response.status_code in BUSY:
                    self.num_refused += 1
                    return None
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    is_done = is_done or data == "[DONE]"
                    if data and not is_done:
                        event = json.loads(data)
                        if "error" in event:
                            self.faults.append(f"stream {index}: {event['error']['message']}")
                            return text
                        text += event["choices"][0]["text"]
        except httpx.HTTPError as error:
            self.faults.append(f"stream {index}: {type(error).__name__}")
        if not is_done:
            self.faults.append(f"stream {index}: no end")
        return text


STREAMED = {"stream": True}


async def text_of(client: httpx.AsyncClient, body: Mapping[str, Any], *, drafted: bool) -> str:
    """The same text, not streamed."""
    sent = {**body, "speculative": {"enabled": drafted}}
    answer = await client.post("/v1/completions", json=sent)
    return answer.raise_for_status().json()["choices"][0]["text"]
