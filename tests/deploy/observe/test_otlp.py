"""Spans reach a collector: OTLP over HTTP, on a real socket."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from support.fakes.fake_engine import FakeEngine
from support.servers.http_server import http_server

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="no extra otel")
pytestmark = pytest.mark.net

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(HTTPServer):
    """Keeps the spans that it is sent, with the attributes of what sent them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taker)
        self.spans: list[Any] = []
        self.services: set[str] = set()


class Taker(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        for part in ExportTraceServiceRequest.FromString(data).resource_spans:
            named = {one.key: one.value.string_value for one in part.resource.attributes}
            self.server.services.add(named["service.name"])
            self.server.spans += [span for scope in part.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_spans_reach_a_collector_when_the_server_ends(collector: Collector) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    async with (
        http_server(FakeEngine(), otlp_traces_endpoint=endpoint) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client,
    ):
        body = {"prompt": "a", "max_tokens": 6}
        header = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        answers = await asyncio.gather(
            client.post("/v1/completions", json=body, headers=header),
            client.post("/v1/completions", json=body),
        )
        assert [answer.status_code for answer in answers] == [200, 200]
    assert collector.services == {"draftline"}
    mine = [span for span in collector.spans if span.trace_id.hex() == TRACE]
    assert sorted(span.name for span in mine) == sorted(
        ["llm_request", "queue", "prefill", "decode", *["draft"] * 4, *["verify", "commit"] * 2]
    )
    assert len(collector.spans) == 2 * len(mine)
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in mine)
