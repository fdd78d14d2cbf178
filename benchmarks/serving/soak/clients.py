"""Sends requests and writes down how each ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

import httpx

from .setup import SoakPrompt

# whole    the answer came to its end
# left     its client went away, as planned
# refused  an HTTP status with an error as OpenAI's API has it
# error    an error event of that form ended a begun stream
# unclear  any other status, or an error of another form
# cut      the connection ended without an end of the answer
# hung     nothing of this within the deadline
End = Literal["whole", "left", "refused", "error", "unclear", "cut", "hung"]
DONE = "[DONE]"


@dataclass(slots=True)
class Choice:
    """One answer of a request, as far as it came."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    finish_reason: str | None = None

    def add(self, part: Mapping[str, Any]) -> None:
        """A choice of a chunk, or of a whole body."""
        said = part.get("delta") or part.get("message") or {}
        self.text += part.get("text") or said.get("content") or ""
        self.token_ids += part.get("token_ids") or ()
        logprobs = part.get("logprobs") or {}
        self.num_logprobs += len(logprobs.get("tokens") or logprobs.get("content") or ())
        self.finish_reason = part.get("finish_reason") or self.finish_reason


@dataclass(slots=True)
class SoakAnswer:
    """What a client saw of one request. Times are of `time.monotonic`.

    detail  status and message of an error, or what the connection ended with
    """

    began_at: float
    end: End = "cut"
    response_id: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    detail: str = ""
    ended_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def add(self, body: Mapping[str, Any]) -> None:
        """A chunk, or a whole body."""
        self.response_id = body.get("id") or self.response_id
        for part in body["choices"]:
            self.choices.setdefault(part["index"], Choice()).add(part)


async def answer_of(
    client: httpx.AsyncClient, ask: SoakPrompt, headers: Mapping[str, str], deadline_s: float
) -> SoakAnswer:
    """The end of a request, whatever it is; after `deadline_s` at the latest."""
    answer = SoakAnswer(time.monotonic())
    leaves_s = ask.leaves_after_s
    limit_s = deadline_s if leaves_s is None else leaves_s
    send = _stream if ask.body["stream"] else _whole
    try:
        async with asyncio.timeout(limit_s):
            await send(client, ask, headers, answer)
    except TimeoutError:
        answer.end = "hung" if leaves_s is None else "left"
    except httpx.HTTPError as error:
        answer.end, answer.detail = "cut", type(error).__name__
    answer.ended_at = time.monotonic()
    return answer


async def _whole(
    client: httpx.AsyncClient, ask: SoakPrompt, headers: Mapping[str, str], answer: SoakAnswer
) -> None:
    response = await client.post(ask.path, json=ask.body, headers=headers)
    if response.status_code != HTTPStatus.OK:
        _refuse(answer, response.status_code, response.text)
        return
    answer.add(response.json())
    answer.end = "whole"


async def _stream(
    client: httpx.AsyncClient, ask: SoakPrompt, headers: Mapping[str, str], answer: SoakAnswer
) -> None:
    async with client.stream("POST", ask.path, json=ask.body, headers=headers) as response:
        if response.status_code != HTTPStatus.OK:
            _refuse(answer, response.status_code, (await response.aread()).decode())
            return
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == DONE:
                # One with an error has its end already.
                answer.end = "whole" if answer.end == "cut" else answer.end
                return
            if data:
                _take(answer, data)


def _take(answer: SoakAnswer, data: str) -> None:
    event = json.loads(data)
    if "error" in event:
        answer.end = "error" if is_clear(event) else "unclear"
        answer.detail = f"{event['error'].get('code')}: {event['error'].get('message')}"
    else:
        answer.add(event)


def _refuse(answer: SoakAnswer, status: int, text: str) -> None:
    body: Any = None
    with suppress(ValueError):
        body = json.loads(text)
    answer.end = "refused" if is_clear(body) else "unclear"
    message = body["error"]["message"] if is_clear(body) else text[:200]
    answer.detail = f"{status}: {message}"


def is_clear(body: Any) -> bool:
    """Whether a body is an error as OpenAI's API has it."""
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and bool(error.get("message")) and bool(error.get("type"))
