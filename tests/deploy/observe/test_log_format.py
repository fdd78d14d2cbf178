"""Log lines as JSON: pairs become fields, and nothing of a request's text is told."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from draftline.core.errors import as_request_failure
from draftline.deploy.observe.log_format import JsonLines, request_id, set_up_logs, use_form
from support.fakes.fake_engine import FakeEngine

SECRET = "what the client wrote"


def line(message: str, *args: Any, exc_info: Any = None) -> dict[str, Any]:
    record = logging.LogRecord("draftline.x", 30, "f", 1, message, args, exc_info)
    return json.loads(JsonLines().format(record))


def test_pairs_are_fields() -> None:
    found = line("event=stage_lost in_flight=%d seconds=%.1f reason=%r", 3, 1.25, "it's 'gone'\n")
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "warning", "logger": "draftline.x", "event": "stage_lost", "in_flight": 3,
        "seconds": 1.2, "reason": "it's 'gone'\\n".replace("\\n", "n"),
    }  # fmt: skip


def test_other_words_are_the_message() -> None:
    found = line("drafter=%s event=no_answer replacing its server", "s")
    assert (found["drafter"], found["event"]) == ("s", "no_answer")
    assert found["message"] == "replacing its server"
    assert line("level=odd")["level"] == "warning", "a pair never hides what the record says"


def test_an_identifier_of_digits_stays_a_text() -> None:
    assert line("request_id=%s", "00123")["request_id"] == "00123"


def test_an_error_is_told_by_its_class_and_place() -> None:
    try:
        raise KeyError(SECRET)
    except KeyError:
        found = line("event=failed error=%s count=2", "KeyError at a.py:1 f < b.py:2 g")
        told = line("event=failed", exc_info=sys.exc_info())
    assert (found["error"], found["count"]) == ("KeyError at a.py:1 f < b.py:2 g", 2)
    assert told["exception"].startswith("KeyError at observe/test_log_format.py")
    assert SECRET not in json.dumps(told)


def test_the_request_of_the_task_is_named() -> None:
    token = request_id.set("r-1")
    assert line("event=odd")["request_id"] == "r-1"
    assert line("event=odd request_id=r-2")["request_id"] == "r-2"
    request_id.reset(token)
    assert "request_id" not in line("event=odd")


def test_lines_go_to_the_real_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve puts a logger in the place of `sys.stderr`, which drops all but errors."""
    real, dropped, root = io.StringIO(), io.StringIO(), logging.getLogger()
    monkeypatch.setattr(sys, "stderr", dropped)
    monkeypatch.setattr(sys, "__stderr__", real)
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    set_up_logs(logging.WARNING, "json")
    logging.getLogger("draftline.x").warning("event=odd count=%d", 3)
    root.setLevel(level)
    told = json.loads(real.getvalue())
    assert (told["event"], told["count"]) == ("odd", 3)
    assert not dropped.getvalue()


@pytest.fixture
def lines() -> Iterator[Any]:
    """What is logged as JSON."""
    stream, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    # Those of pytest are there, too.
    before = [(own, own.formatter) for own in root.handlers]
    root.addHandler(handler)
    use_form("json")
    requests = logging.getLogger("draftline.requests")
    level = requests.level
    yield lambda: [json.loads(text) for text in stream.getvalue().splitlines()]
    root.removeHandler(handler)
    for own, formatter in before:
        own.setFormatter(formatter)
    requests.setLevel(level)


async def test_a_request_and_its_answer_are_logged(serving: Any, lines: Any) -> None:
    async with serving(FakeEngine(), log_requests=True, api_keys=("key",)) as client:
        client.headers["authorization"] = "Bearer key"
        body = {"prompt": SECRET, "max_tokens": 6, "stream": True}
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        told = lines()
    events = [own["event"] for own in told]
    assert events == ["answer", "request"]
    assert all(own["request_id"] == "mine" for own in told)
    first = json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))
    assert told[0]["response_id"] == first["id"]
    assert (told[0]["prompt_tokens"], told[0]["tokens"], told[0]["tau"]) == (len(SECRET), 6, 2.5)
    assert (told[0]["queue_s"], told[0]["first_token_s"], told[0]["seconds"]) == (0.25, 0.5, 2.0)
    assert (told[1]["method"], told[1]["path"]) == ("POST", "/v1/completions")
    assert told[1]["status"] == 200
    assert SECRET not in json.dumps(told)


async def test_a_refused_request_is_logged_and_its_path_is_no_text(
    serving: Any, lines: Any
) -> None:
    async with serving(FakeEngine(), log_requests=True, api_keys=("key",)) as client:
        await client.get(f"/v1/models/{SECRET}")
        await client.post("/v1/completions", json={"prompt": SECRET})
        told = lines()
    assert [(own["path"], own["status"]) for own in told] == [
        ("other", 401),
        ("/v1/completions", 401),
    ]
    assert SECRET not in json.dumps(told)


async def test_nothing_is_logged_unless_asked(client: httpx.AsyncClient, lines: Any) -> None:
    await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 6})
    assert lines() == []


def test_an_unforeseen_error_is_one_line(lines: Any) -> None:
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        as_request_failure(error, "cmpl-1")
    (told,) = lines()
    assert (told["event"], told["request_id"]) == ("request_failed", "cmpl-1")
    assert told["error"].startswith("ValueError at observe/test_log_format.py")
    assert "message" not in told
    assert SECRET not in json.dumps(told)
