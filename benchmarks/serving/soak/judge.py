"""What became of each request of a soak, and what is wrong with that."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from ....cluster.config import EngineConfig
from ....deploy.api.app import create_app
from ....deploy.api.engine_client import LocalEngineClient
from ....deploy.engine.async_engine import AsyncEngine
from ....deploy.settings.settings import ServerConfig
from .clients import Choice, SoakAnswer, answer_of
from .faults import Done
from .setup import SoakPrompt

AT_ONCE = 16
DEADLINE_S = 600.0
PLAIN = {"stream": False, "speculative": {"enabled": False}}


async def plain_answers(asks: Sequence[SoakPrompt]) -> list[SoakAnswer]:
    """What plain decoding answers to each; bodies that come again are decoded once."""
    engine = AsyncEngine(EngineConfig(model="demo", drafters=[]))
    app = create_app(LocalEngineClient(engine), ServerConfig(), "demo")
    transport = httpx.ASGITransport(app)
    room = asyncio.Semaphore(AT_ONCE)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://plain") as client,
    ):

        async def decode(ask: SoakPrompt) -> SoakAnswer:
            async with room:
                answer = await answer_of(client, ask, {}, DEADLINE_S)
            assert answer.end == "whole", answer
            return answer

        plain = {_key(ask.body): _plain(ask) for ask in asks}
        answers = await asyncio.gather(*map(decode, plain.values()))
    found = dict(zip(plain, answers, strict=True))
    return [found[_key(ask.body)] for ask in asks]


def _plain(ask: SoakPrompt) -> SoakPrompt:
    return replace(ask, body={**ask.body, **PLAIN}, leaves_after_s=None)


def _key(body: Mapping[str, Any]) -> str:
    return json.dumps({**body, **PLAIN}, sort_keys=True)


def difference(answer: SoakAnswer, plain: SoakAnswer) -> str | None:
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


# Of the streams that were interrupted, and of all requests whose clients stayed.
MIN_RESUMED, MIN_WHOLE = 0.99, 0.9
# Within this time the connections to an ingress that is lost have ended.
NOTICED_S = 15.0
# Clear errors, and what Ray Serve's proxy makes of requests whose ingress is gone.
CLEAR = ("refused", "error")
OF_PROXY = ("cut", "unclear")
WITH_INGRESS = "with_ingress"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. `end`: as of `clients.End`, or `with_ingress`; `wrong`: how its answer differs
    from plain decoding's; `was_resumed`: another replica went on with it."""

    ask: SoakPrompt
    answer: SoakAnswer
    end: str
    wrong: str | None
    was_resumed: bool

    @property
    def was_interrupted(self) -> bool:
        """Whether it lost its replica once it had tokens, and its client and its ingress stayed."""
        has_lost = self.was_resumed or self.end == "error"
        return has_lost and self.end not in ("left", WITH_INGRESS)

    @property
    def is_right(self) -> bool:
        """Whether it came to its end, with the text of plain decoding."""
        return self.end == "whole" and self.wrong is None


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakVerdict:
    """What is reported of all requests.

    ends         requests by how they ended
    interrupted  those that lost their replica once they had tokens
    resumed      of these, how many came to the right end
    tokens       that were compared
    errors       requests by the clear error that they ended with
    problems     what must not be; empty: all is well
    """

    ends: Mapping[str, int]
    interrupted: int
    resumed: int
    tokens: int
    slowest_s: float
    errors: Mapping[str, int]
    problems: Sequence[str]


def outcomes_of(
    asks: Sequence[SoakPrompt],
    answers: Sequence[SoakAnswer],
    plain: Sequence[SoakAnswer],
    faults: Sequence[Done],
    resumed: Collection[str],
) -> list[Outcome]:
    """Each request with its answer and plain decoding's.

    `resumed`: ids of answers that another replica went on with.
    """
    return [
        Outcome(
            ask=ask,
            answer=answer,
            end=_end(answer, faults),
            wrong=difference(answer, expected),
            was_resumed=answer.response_id in resumed,
        )
        for ask, answer, expected in zip(asks, answers, plain, strict=True)
    ]


def judge(outcomes: Sequence[Outcome]) -> SoakVerdict:
    """Count, and name what is wrong."""
    met = [outcome for outcome in outcomes if outcome.was_interrupted]
    answers = [outcome.answer for outcome in outcomes]
    return SoakVerdict(
        ends=Counter(outcome.end for outcome in outcomes),
        interrupted=len(met),
        resumed=sum(outcome.is_right for outcome in met),
        tokens=sum(answer.num_tokens for answer in answers),
        slowest_s=round(max((one.ended_at - one.began_at for one in answers), default=0.0), 2),
        errors=Counter(one.detail for one in answers if one.end in CLEAR),
        problems=[*_problems(outcomes), *_shares(outcomes)],
    )


def _end(answer: SoakAnswer, faults: Sequence[Done]) -> str:
    is_taken = answer.end in OF_PROXY and any(_took_along(fault, answer) for fault in faults)
    return WITH_INGRESS if is_taken else answer.end


def _took_along(done: Done, answer: SoakAnswer) -> bool:
    return "ingress" in done.lost and 0 <= answer.ended_at - done.began_at < NOTICED_S


def _problems(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for one in outcomes:
        name = f"{one.ask.kind} {one.ask.path} {one.answer.response_id}"
        if one.wrong is not None:
            resumed = ", resumed" if one.was_resumed else ""
            yield f"wrong ({one.end}{resumed}): {name}: {one.wrong}"
        if one.end in ("hung", *OF_PROXY):
            yield f"{one.end}: {name}: {one.answer.detail}"


def _shares(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Too many clear errors are wrong, too."""
    met = [one for one in outcomes if one.was_interrupted]
    stayed = [one for one in outcomes if one.end not in ("left", WITH_INGRESS)]
    for what, ones, least in (
        ("interrupted streams", met, MIN_RESUMED),
        ("requests", stayed, MIN_WHOLE),
    ):
        right = sum(one.is_right for one in ones)
        if right < least * len(ones):
            yield f"{right} of {len(ones)} {what} came to the right end, fewer than {least:.0%}"
