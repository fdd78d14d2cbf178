"""Work that takes long is not done on the API's event loop; what is small is, which is quicker."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from draftline.cluster import loop_calls
from draftline.cluster.loop_calls import MAX_BUSY_THREADS, off_loop
from draftline.deploy.api.output import completions
from draftline.deploy.api.schema.request_models import RequestModel
from support.fakes.fake_engine import FakeEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "word " * 2000


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[bool]]]:
    """By kind of work, whether it was done on the loop's own thread."""
    seen: dict[str, set[bool]] = {}

    def watch(owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)
        function = getattr(original, "__func__", original)

        def watched(*args: Any, **kwargs: Any) -> Any:
            on_loop = threading.current_thread() is threading.main_thread()
            seen.setdefault(kind, set()).add(on_loop)
            return function(*args, **kwargs)

        is_method = original is not function and isinstance(owner, type)
        monkeypatch.setattr(owner, name, classmethod(watched) if is_method else watched)

    watch(RequestModel, "parse", "parse")
    watch(completions, "_top", "log-probabilities")
    watch(completions, "write_object", "body")
    return seen


def watch_tokenizer(engine: FakeEngine, seen: dict[str, set[bool]]) -> None:
    def watch(name: str) -> None:
        own = getattr(engine.tokenizer, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            on_loop = threading.current_thread() is threading.main_thread()
            seen.setdefault(name, set()).add(on_loop)
            return own(*args, **kwargs)

        setattr(engine.tokenizer, name, watched)

    for name in ("encode", "apply_chat_template", "decode", "convert_ids_to_tokens"):
        watch(name)


CASES = [
    ({"prompt": "abc"}, COMPLETIONS, {"parse", "encode"}),
    ({"prompt": [LONG[:100]] * 100}, COMPLETIONS, {"encode"}),
    ({"prompt": LONG * 3}, COMPLETIONS, {"parse", "encode"}),
    ({"messages": [{"role": "user", "content": "hi"}]}, CHAT, {"apply_chat_template", "encode"}),
    ({"messages": [{"role": "user", "content": ""}] * 100}, CHAT, {"apply_chat_template"}),
    ({"messages": [{"role": "user", "content": LONG}]}, CHAT, {"apply_chat_template", "encode"}),
    ({"prompt": LONG, "return_token_strs": True}, "/tokenize",
     {"encode", "convert_ids_to_tokens", "body"}),
    ({"tokens": [1] * 9000}, "/detokenize", {"parse", "decode", "body"}),
    ({"prompt": [[1] * 100] * 4, "echo": True, "logprobs": 2}, COMPLETIONS, {"log-probabilities"}),
    ({"prompt": [1] * 120, "echo": True, "logprobs": 20, "stream": True, "max_tokens": 1},
     COMPLETIONS, {"log-probabilities"}),
    ({"prompt": "a", "logprobs": 1, "max_tokens": 2}, COMPLETIONS, {"log-probabilities"}),
]  # fmt: skip
SMALL = {0, 3, 10}


@pytest.mark.parametrize("index", range(len(CASES)))
async def test_only_small_work_is_done_on_the_loop(
    client: httpx.AsyncClient, engine: FakeEngine, threads: dict[str, set[bool]], index: int
) -> None:
    body, path, kinds = CASES[index]
    watch_tokenizer(engine, threads)
    response = await client.post(path, json=body)
    assert response.status_code < 500, response.text
    for kind in kinds:
        assert threads[kind] == {index in SMALL}, kind


async def test_few_threads_do_the_work() -> None:
    names = set()

    def work() -> None:
        names.add(threading.current_thread().name)

    for _ in range(4 * MAX_BUSY_THREADS):
        await off_loop(work)
    assert 1 <= len(names) <= MAX_BUSY_THREADS
    with pytest.raises(ZeroDivisionError):
        await off_loop(lambda: 1 // 0)


async def test_work_waits_on_the_loop_not_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    outstanding, most = 0, 0

    class Pool(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            nonlocal outstanding, most
            outstanding += 1
            most = max(most, outstanding)
            return super().submit(*args, **kwargs)

    async def call() -> None:
        nonlocal outstanding
        await off_loop(lambda: None)
        outstanding -= 1

    with Pool(MAX_BUSY_THREADS) as pool:
        monkeypatch.setattr(loop_calls, "_busy", pool)
        await asyncio.gather(*(call() for _ in range(8 * MAX_BUSY_THREADS)))
    assert most == MAX_BUSY_THREADS


def test_bodies_are_written_in_slices_that_make_the_same_text() -> None:
    numbers = list(range(3 * completions.INLINE_VALUES + 1))
    fields = {"count": 3, "tokens": numbers, "texts": ["ü", "\n"], "none": None, "empty": []}
    assert json.loads(completions.write_object(fields)) == fields
    lazy = completions.LazyList(lambda one: {"square": one * one}, [1, 2, 3])
    written = completions.write_json({"a": lazy, "b": [lazy]})
    squares = [{"square": 1}, {"square": 4}, {"square": 9}]
    assert json.loads(written) == {"a": squares, "b": [squares]}


async def test_nothing_collects_while_a_large_body_is_read(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    parse = RequestModel.build.__func__

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.isenabled())
        return parse(*args, **kwargs)

    monkeypatch.setattr(RequestModel, "build", classmethod(watched))
    for prompt in ("hi", LONG * 10):
        await client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
    assert seen == [True, False]
    assert gc.isenabled()


def test_the_collector_works_again_when_the_last_pause_has_ended() -> None:
    with loop_calls.collector_paused():
        with pytest.raises(ZeroDivisionError), loop_calls.collector_paused():
            _ = 1 // 0
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with loop_calls.collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
