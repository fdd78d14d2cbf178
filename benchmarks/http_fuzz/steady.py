"""Streams whose texts must not change, whatever else is asked of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import httpx

from ...deploy.cli.demo.held_out_prompts import held_out_prompts

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
