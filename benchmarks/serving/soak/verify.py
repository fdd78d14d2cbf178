"""Whether answers are those of plain decoding, in an engine of this process that drafts nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from ....cluster.config import EngineConfig
from ....deploy.api.app import create_app
from ....deploy.api.engine_client import LocalEngineClient
from ....deploy.engine.async_engine import AsyncEngine
from ....deploy.settings.settings import ServerConfig
from .clients import Answer, Choice, answer_of
from .plan import Ask

AT_ONCE = 16
DEADLINE_S = 600.0
PLAIN = {"stream": False, "speculative": {"enabled": False}}


async def plain_answers(asks: Sequence[Ask]) -> list[Answer]:
    """What plain decoding answers to each; bodies that come again are decoded once."""
    engine = AsyncEngine(EngineConfig(model="demo", drafters=[]))
    app = create_app(LocalEngineClient(engine), ServerConfig(), "demo")
    transport = httpx.ASGITransport(app)
    room = asyncio.Semaphore(AT_ONCE)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://plain") as client,
    ):

        async def decode(ask: Ask) -> Answer:
            async with room:
                answer = await answer_of(client, ask, {}, DEADLINE_S)
            assert answer.end == "whole", answer
            return answer

        plain = {_key(ask.body): _plain(ask) for ask in asks}
        answers = await asyncio.gather(*map(decode, plain.values()))
    found = dict(zip(plain, answers, strict=True))
    return [found[_key(ask.body)] for ask in asks]


def _plain(ask: Ask) -> Ask:
    return replace(ask, body={**ask.body, **PLAIN}, leaves_after_s=None)


def _key(body: Mapping[str, Any]) -> str:
    return json.dumps({**body, **PLAIN}, sort_keys=True)


def difference(answer: Answer, plain: Answer) -> str | None:
    """How an answer differs from plain decoding's, as far as it came; None: in nothing."""
    is_whole = answer.end == "whole"
    if is_whole and answer.choices.keys() != plain.choices.keys():
        return f"choices {sorted(answer.choices)} instead of {sorted(plain.choices)}"
    for index, choice in answer.choices.items():
        if found := _difference(choice, plain.choices[index], is_whole=is_whole):
            return f"choice {index}: {found}"
    return None


def _difference(choice: Choice, plain: Choice, *, is_whole: bool) -> str | None:
    pairs = zip(choice.token_ids, plain.token_ids, strict=False)
    for position, (found, expected) in enumerate(pairs):
        if found != expected:
            return f"token {position}: {found} instead of {expected}"
    if is_whole and choice != plain:
        return f"{_ending(choice)} instead of {_ending(plain)}"
    is_beginning = plain.text.startswith(choice.text) and choice.num_logprobs <= plain.num_logprobs
    if not is_beginning or len(choice.token_ids) > len(plain.token_ids):
        return f"{_ending(choice)} is no beginning of {_ending(plain)}"
    return None


def _ending(choice: Choice) -> str:
    return (
        f"{len(choice.token_ids)} tokens, {choice.num_logprobs} log-probabilities, "
        f"{choice.finish_reason}, ...{choice.text[-40:]!r}"
    )
