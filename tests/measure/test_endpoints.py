"""Both endpoints read streams right: an engine's, draftline's over HTTP, and a foreign server's."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.core.errors import ConfigError, DraftlineError
from draftline.core.request.output import Delta
from draftline.core.request.sampling_params import RequestOptions, SamplingParams
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.settings.settings import ServerConfig
from draftline.measure.clients.endpoint import Ask, Setting
from draftline.measure.clients.engine_endpoint import EngineEndpoint
from draftline.measure.clients.http_endpoint import HttpEndpoint
from draftline.measure.runs.lossless import ChiSquare, check_first_token, check_seeds
from support.fakes.fake_engine import FakeEngine

TEXT = "def f(x):\n    return x\n"
TARGET, SPECTRA = Setting("target", ()), Setting("spectra", ("spectra",))
ASK = Ask(name="a", prompt="abc", setting=SPECTRA, max_tokens=99, temperature=0.5, seed=4, salt="s")
DRAFTED = EngineConfig(model="tiny", drafters=(DrafterConfig(kind="spectra"),))


class PromptEngine(FakeEngine):
    """Takes texts, as `AsyncEngine` does; `wrong` is answered where drafters may propose."""

    def __init__(self, wrong: str = TEXT) -> None:
        super().__init__(TEXT)
        self._right = self._answer
        self._wrong = tuple(self.tokenizer.encode(wrong))

    async def stream(
        self, prompt: Any, params: Any = None, options: Any = None, *, request_id: str | None = None
    ) -> AsyncGenerator[Delta, None]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self._answer = self._wrong if options.speculative else self._right
        async for delta in super().stream(ids, params, options, request_id=request_id or "r"):
            yield delta


@asynccontextmanager
async def draftline_server(engine: FakeEngine) -> AsyncIterator[HttpEndpoint]:
    engine_client = LocalEngineClient(engine)  # pyright: ignore[reportArgumentType]
    app = create_app(engine_client, ServerConfig(), "tiny", engine=DRAFTED)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        HttpEndpoint("http://test", http_client=httpx.AsyncClient(transport=transport)) as endpoint,
    ):
        yield await endpoint.connect()


async def test_an_engine() -> None:
    engine = PromptEngine()
    record = await EngineEndpoint(engine, per_request=True).answer(ASK)
    assert record.text == TEXT
    assert record.num_tokens == len(TEXT)
    assert record.token_ids == tuple(engine.tokenizer.encode(TEXT))
    assert record.arrivals[0].sources == ("spectra", "target")
    assert record.counts is not None
    assert record.counts.num_steps == len(record.arrivals) - 1
    # The last part has one token, the target's own.
    assert record.counts.accepted["spectra"] == len(record.arrivals) - 2
    _, params, options = engine.calls[0]
    assert params == SamplingParams(max_tokens=99, temperature=0.5, seed=4, ignore_eos=True)
    assert options == RequestOptions(cache_salt="s", drafters=("spectra",))


async def test_an_engine_with_the_settings_own_drafters() -> None:
    engine = PromptEngine()
    await EngineEndpoint(engine, per_request=False).answer(ASK)
    assert engine.calls[0][2] == RequestOptions(cache_salt="s")


async def test_a_draftline_server_tells_all_that_an_engine_tells() -> None:
    engine = PromptEngine()
    local = await EngineEndpoint(engine, per_request=True).answer(ASK)
    async with draftline_server(engine) as endpoint:
        assert endpoint.info.drafters == ("spectra",)
        assert endpoint.info.is_draftline
        record = await endpoint.answer(ASK)
    assert engine.calls[0][1:] == engine.calls[1][1:]
    assert (record.text, record.token_ids) == (local.text, local.token_ids)
    assert [one.sources for one in record.arrivals] == [one.sources for one in local.arrivals]
    assert record.num_tokens == local.num_tokens
    assert record.counts is not None
    assert local.counts is not None
    assert record.counts.lengths == local.counts.lengths
    assert record.counts.accepted == local.counts.accepted


async def test_the_target_alone_is_asked_for() -> None:
    engine = PromptEngine()
    async with draftline_server(engine) as endpoint:
        await endpoint.answer(Ask(name="a", prompt="abc", setting=TARGET, max_tokens=4,
                                  temperature=0.0, seed=0))  # fmt: skip
    assert not engine.calls[0][2].speculative


@pytest.mark.parametrize(("wrong", "num_wrong"), [(TEXT, 0), (TEXT.replace("f", "g"), 3)])
async def test_seeds_on_a_server(wrong: str, num_wrong: int) -> None:
    async with draftline_server(PromptEngine(wrong)) as endpoint:
        found = await check_seeds(endpoint, TARGET, SPECTRA, seeds=3, together=2)
    assert len(found.differences) == num_wrong
    assert (found.num_seeds, found.num_distinct) == (3, 1)
    assert found.num_drafted > 0


def chunk(**fields: Any) -> str:
    body = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": []}
    return f"data: {json.dumps(body | fields)}\n\n"


def choice(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def said(text: str, reason: str | None = None, **delta: str) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text, **delta}, "finish_reason": reason}


class Foreign:
    """A server of another kind: it knows no field beyond OpenAI's, and may give logprobs."""

    def __init__(self, *, usage: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._usage = usage

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            card = {"id": "m", "object": "model", "created": 1, "owned_by": "other"}
            return httpx.Response(200, json={"object": "list", "data": [card]})
        body = json.loads(request.content)
        self.bodies.append(body)
        if body.get("logprobs"):
            return httpx.Response(200, json=self._with_logprobs(body["seed"]))
        usage = {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}
        make = said if "messages" in body else choice
        events = [chunk(choices=[make(text)]) for text in ("ab", "cde")]
        if "messages" in body:
            events.insert(0, chunk(choices=[said("", role="assistant")]))
        events.append(chunk(choices=[make("", "length")]))
        if self._usage:
            events.append(chunk(usage=usage))
        return httpx.Response(
            200,
            headers={"content-type": "text/event-stream"},
            text="".join(events) + "data: [DONE]\n\n",
        )

    def _with_logprobs(self, seed: int) -> dict[str, Any]:
        token = "ab"[seed % 2]
        told = {"tokens": [token], "token_logprobs": [-0.69], "text_offset": [0]}
        told["top_logprobs"] = [{"a": -0.693147, "b": -0.693147}]
        one = choice(token) | {"logprobs": told, "finish_reason": "length"}
        return {
            "id": "c",
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": [one],
        }


def foreign(server: Foreign) -> HttpEndpoint:
    client = httpx.AsyncClient(transport=httpx.MockTransport(server))
    return HttpEndpoint("http://test/v1", http_client=client)


async def test_a_foreign_server_gets_no_foreign_field() -> None:
    server = Foreign()
    async with foreign(server) as endpoint:
        await endpoint.connect("m")
        record = await endpoint.answer(ASK)
    assert (record.text, record.num_tokens, len(record.arrivals)) == ("abcde", 5, 2)
    assert record.counts is None
    assert record.token_ids is None
    assert "speculative" not in server.bodies[0]
    assert "cache_salt" not in server.bodies[0]


async def test_a_chat_is_asked_as_one() -> None:
    messages = ({"role": "user", "content": "abc"},)
    server = Foreign()
    async with foreign(server) as endpoint:
        await endpoint.connect("m")
        record = await endpoint.answer(replace(ASK, prompt=messages))
    assert (record.text, record.num_tokens, len(record.arrivals)) == ("abcde", 5, 2)
    assert record.num_prompt_tokens == 1
    assert server.bodies[0]["messages"] == list(messages)


async def test_a_chat_goes_through_the_template_in_an_engine_and_on_a_server() -> None:
    engine = PromptEngine()
    chat = replace(ASK, prompt=({"role": "user", "content": "abc"},))
    endpoint = EngineEndpoint(engine, per_request=True, tokenizer=engine.tokenizer)
    local = await endpoint.answer(chat)
    async with draftline_server(engine) as server:
        record = await server.answer(chat)
    prompts = [list(call[0]) for call in engine.calls]
    assert prompts[0] == prompts[1] != engine.tokenizer.encode("abc")
    assert (record.text, record.token_ids) == (local.text, local.token_ids)
    assert record.num_prompt_tokens == local.num_prompt_tokens == len(prompts[0])


async def test_logprobs_are_tested_where_the_server_gives_them() -> None:
    async with foreign(Foreign()) as endpoint:
        await endpoint.connect()
        found = await check_first_token(endpoint, TARGET, seeds=20)
    assert not isinstance(found, str)
    assert (found.num_bins, found.statistic) == (2, pytest.approx(0, abs=1e-4))


async def test_logprobs_of_an_engine_are_tested() -> None:
    """The fake engine says exp(-1) to exp(-5) of five tokens, and never gives one of them."""
    engine = PromptEngine()
    found = await check_first_token(EngineEndpoint(engine, per_request=True), TARGET, seeds=200)
    assert isinstance(found, ChiSquare)
    # The fourth and fifth are expected less than five times, and join all others.
    assert (found.num_draws, found.num_bins) == (200, 4)
    assert not found.is_sound
    assert {call[1].max_tokens for call in engine.calls} == {1}


async def test_a_server_without_logprobs_skips_that_check() -> None:
    async with draftline_server(PromptEngine()) as endpoint:
        found = await check_first_token(endpoint, TARGET, seeds=3)
    assert isinstance(found, str) or found.num_draws == 3


async def test_errors_name_what_is_wrong() -> None:
    async with foreign(Foreign(usage=False)) as endpoint:
        with pytest.raises(ConfigError, match="model: 'x' is not served; known: m"):
            await endpoint.connect("x")
        await endpoint.connect()
        with pytest.raises(DraftlineError, match="prompt a: the server sends no usage"):
            await endpoint.answer(ASK)
    async with draftline_server(PromptEngine()) as endpoint:
        unknown = Ask(name="b", prompt="\0", setting=TARGET, max_tokens=10_000, temperature=0.0,
                      seed=0)  # fmt: skip
        with pytest.raises(DraftlineError, match=r"prompt b: .*max_tokens"):
            await endpoint.answer(unknown)
