"""Spans of requests: in the client's trace, of the engine's times, and without text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from draftline.core.errors import ConfigError, StageError
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.observe.otlp import require_exporter
from draftline.deploy.observe.spans import RequestTracer
from draftline.deploy.settings.settings import ServerConfig
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from support.fakes.fake_engine import FakeEngine

SECRET = "what the client wrote"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": SECRET, "max_tokens": 6}
COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def traced(
    engine: FakeEngine, rate: float = 1.0
) -> AsyncIterator[tuple[httpx.AsyncClient, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(rate)))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # 100 s after the fake engine's last time.
    tracer = RequestTracer(provider.get_tracer("t"), now_ns=lambda: 112_000_000_000)
    client = LocalEngineClient(engine)  # pyright: ignore[reportArgumentType]
    app = create_app(client, ServerConfig(), "tiny", tracer=tracer)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
    ):
        yield http, exporter


def named(spans: tuple[ReadableSpan, ...], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


async def test_a_request_has_its_parts_in_the_clients_trace() -> None:
    async with traced(FakeEngine()) as (client, exporter):
        header = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        answer = await client.post(COMPLETIONS, json=BODY, headers=header)
    spans = exporter.get_finished_spans()
    assert "draftline" not in answer.json(), "its trees are not the client's"
    (request,) = named(spans, "llm_request")
    assert request.parent is not None
    assert (f"{request.parent.span_id:016x}", request.parent.is_remote) == (PARENT, True)
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    assert dict(request.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": answer.json()["id"],
        "draftline.request_id": "mine",
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": 6,
    }
    # The engine's 10.0 to 12.0; its last time, 12.0, is now.
    for name, times in {"queue": (110.0, 110.25), "prefill": (110.25, 110.5)}.items():
        (span,) = named(spans, name)
        assert (seconds(span), span.parent) == (times, request.context)
    (decode,) = named(spans, "decode")
    assert (seconds(decode), decode.parent) == ((110.5, 112.0), request.context)
    assert decode.attributes is not None
    assert (decode.attributes["draftline.steps"], decode.attributes["draftline.tau"]) == (2, 2.5)


async def test_a_step_has_drafts_by_source_verification_and_commit() -> None:
    async with traced(FakeEngine()) as (client, exporter):
        await client.post(COMPLETIONS, json=BODY | {"stream": True})
    spans = exporter.get_finished_spans()
    (decode,) = named(spans, "decode")
    drafts = named(spans, "draft")
    told = [dict(span.attributes or {}) for span in drafts]
    assert told == [
        {
            "draftline.source": source, "draftline.verified": verified,
            "draftline.accepted": accepted, "draftline.step": step,
        }
        for step in range(2)
        for source, verified, accepted in (("suffix", 1, 0), ("spectra", 2, 1))
    ]  # fmt: skip
    assert {seconds(span) for span in drafts} == {(111.0, 111.25)}
    assert [seconds(span) for span in named(spans, "verify")] == [(111.25, 111.75)] * 2
    assert [seconds(span) for span in named(spans, "commit")] == [(111.75, 111.875)] * 2
    steps = [span for span in spans if span.name in {"draft", "verify", "commit"}]
    assert all(span.parent == decode.context for span in steps)
    assert len(steps) == 8


async def test_every_answer_of_a_request_has_its_spans() -> None:
    async with traced(FakeEngine()) as (client, exporter):
        await client.post(COMPLETIONS, json=BODY | {"n": 2})
    decodes = named(exporter.get_finished_spans(), "decode")
    assert sorted((span.attributes or {})["draftline.answer"] for span in decodes) == [0, 1]


@pytest.mark.parametrize(("header", "rate"), [({"traceparent": f"00-{TRACE}-{PARENT}-00"}, 1.0),
                                              ({}, 0.0)])  # fmt: skip
async def test_who_is_not_sampled_costs_nothing(header: dict[str, str], rate: float) -> None:
    engine = FakeEngine()
    async with traced(engine, rate) as (client, exporter):
        assert (await client.post(COMPLETIONS, json=BODY, headers=header)).status_code == 200
    assert exporter.get_finished_spans() == ()
    assert not engine.calls[0][2].explain


async def test_a_broken_traceparent_begins_a_trace() -> None:
    async with traced(FakeEngine()) as (client, exporter):
        await client.post(COMPLETIONS, json=BODY, headers={"traceparent": "00-xyz"})
    (request,) = named(exporter.get_finished_spans(), "llm_request")
    assert request.parent is None


@pytest.mark.parametrize("at", [0, 1])
async def test_an_error_is_told_without_its_message(at: int) -> None:
    engine = FakeEngine(error=StageError(SECRET), error_at=at)
    async with traced(engine) as (client, exporter):
        await client.post(COMPLETIONS, json=BODY | {"stream": True})
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok
    assert (span.attributes or {})["error.type"] == "StageError"
    assert SECRET not in span.to_json()


async def test_spans_hold_no_text() -> None:
    async with traced(FakeEngine(SECRET[::-1] * 3)) as (client, exporter):
        await client.post("/v1/chat/completions", json={
            "messages": [{"role": "user", "content": SECRET}], "stream": True,
        })  # fmt: skip
    told = json.dumps([json.loads(span.to_json()) for span in exporter.get_finished_spans()])
    assert "chat" in told
    assert SECRET not in told
    assert SECRET[::-1] not in told


def test_what_sends_spans_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
    monkeypatch.setattr("draftline.deploy.observe.otlp.EXPORTER", "draftline.no.such.module")
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint.*draftline\[otel\]"):
        require_exporter(config)
    require_exporter(ServerConfig())
