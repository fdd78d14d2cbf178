"""What the fuzz run calls a fault, and that its cases are the same each time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draftline.deploy.api.app import create_app
from draftline.deploy.settings.settings import ServerConfig
from support.fakes.fake_engine import FakeEngine
from support.fuzz.http_cases import PATHS, FuzzRequest, make_cases
from support.fuzz.http_clients import error_fault, raw_fault, stream_fault
from support.fuzz.http_run import OWN_PROCESSES, SLACK_FDS, left_behind, logged
from support.fuzz.http_server import ServerHoldings
from support.fuzz.http_values import MARKER

AT_REST = ServerHoldings(
    fds=10, threads=12, processes=1, running=0, waiting=0, kv_usage=0.0, accepted_tokens=0.0
)


def error(status: int, message: str) -> bytes:
    return json.dumps({"error": {"message": message, "code": status}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (400, error(400, "no"), ""),
        (503, error(503, "the server has 9 connections, all of them busy"), ""),
        (503, error(503, "the model is recovering"), "503: the model is recovering"),
        (500, error(500, "an internal error"), "500: an internal error"),
        (400, b"Invalid HTTP request", "400 without an error in its body"),
        (404, b'{"detail": "Not Found"}', "404 without an error in its body"),
        (400, error(400, ""), "400 without a message"),
    ],
)
def test_errors(status: int, body: bytes, fault: str) -> None:
    assert error_fault(status, body) == fault
    head = f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    assert raw_fault(head + body) == (status, fault)


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (['data: {"choices": []}', "", "data: [DONE]"], ""),
        (['data: {"error": {"message": "no", "code": 400}}'], ""),
        (['data: {"type": "response.completed", "response": {"error": null}}'], ""),
        (['data: {"choices": []}'], "a stream without an end"),
        ([], "a stream without an end"),
        (['data: {"error": {"message": "oh", "code": 500}}'], "500: oh"),
        (['data: {"a": NaN}'], "an event: an answer that is no JSON: NaN is no JSON"),
    ],
)
async def test_streams(lines: list[str], fault: str) -> None:
    async def come() -> AsyncIterator[str]:
        for line in lines:
            yield line

    assert await stream_fault(come(), None) == fault


@pytest.mark.parametrize(
    "more",
    [
        {"fds": 11 + SLACK_FDS},
        {"processes": 1 + OWN_PROCESSES},
        {"threads": 99},
        {"running": 1},
        {"kv_usage": 0.1},
    ],
)
def test_what_is_left_behind(more: dict[str, Any]) -> None:
    assert not left_behind(AT_REST, replace(AT_REST, accepted_tokens=5.0))
    assert len(left_behind(AT_REST, replace(AT_REST, **more))) == 1


def test_text_of_requests_in_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"ready\nprompt {MARKER}\nTraceback (most recent call last):\n")
    assert len(logged(log)) == 2


def test_cases_are_all_different_and_the_same_each_time() -> None:
    document = create_app(FakeEngine(), ServerConfig(), "demo").openapi()
    cases = make_cases(document, 150, 7)
    assert len(cases) == len(set(cases)) == 150
    assert {case.path for case in cases if isinstance(case, FuzzRequest)} == set(PATHS)
    assert make_cases(document, 150, 7) == cases
    assert make_cases(document, 150, 8) != cases
