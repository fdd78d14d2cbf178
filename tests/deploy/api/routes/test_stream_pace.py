"""Streams on a fixed beat: the same text, in events that do not tell what was drafted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from draftline import AsyncEngine, DrafterConfig, EngineConfig, SamplingParams
from draftline.core.errors import StageLost
from draftline.core.request.output import (
    Delta,
    RequestMetrics,
    StepTiming,
    TokenLogProb,
    VerifiedTree,
)
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.api.output.stream_pace import Pace
from draftline.deploy.settings.settings import ServerConfig
from draftline.models.text.tokenizer import Detokenizer, TokenBytes
from hypothesis import given
from hypothesis import strategies as st
from support.fakes.fake_engine import FakeEngine, byte_tokenizer

TOKENIZER = byte_tokenizer()
TIMING = StepTiming((), 0.0, 0.0, 0.0, 0.0, 0.0)
METRICS = RequestMetrics(prompt_tokens=1, generated_tokens=1, num_steps=1, num_draft_tokens=0)


def deltas_of(text: str, sizes: Sequence[int], lag: int = 0) -> list[Delta]:
    """The answer `text` in deltas of `sizes` tokens; its text lags `lag` tokens behind."""
    tokens = TOKENIZER.encode(text)
    deltas, start, num_chars = [], 0, 0
    for number, size in enumerate(sizes):
        part = tokens[start : start + size]
        start += size
        is_last = number == len(sizes) - 1
        known = text if is_last else TOKENIZER.decode(tokens[: max(0, start - lag)])
        known = known.rstrip("\ufffd")
        deltas.append(
            Delta(
                request_id="r",
                token_ids=tuple(part),
                sources=tuple(f"s{index}" for index in range(start - size, start)),
                text=known[num_chars:],
                finish_reason="stop" if is_last else None,
                metrics=METRICS if is_last else None,
                log_probs=tuple(TokenLogProb(token, -0.5) for token in part),
                prompt_log_probs=None if number else (None,),
                trees=(VerifiedTree(number, (), (), (), (), (), 0, TIMING),),
            )
        )
        num_chars = len(known)
    return deltas


class GivenEngine(FakeEngine):
    """Streams the given deltas, and then raises, where there is something to raise."""

    def __init__(self, deltas: Sequence[Delta], error: Exception | None = None) -> None:
        super().__init__()
        self._given = deltas
        self._then = error
        self.is_closed_early = False

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Delta, None]:
        self.is_closed_early = True
        for delta in self._given:
            await asyncio.sleep(0)
            yield delta
        if self._then is not None:
            raise self._then
        self.is_closed_early = False


def paced(
    engine: FakeEngine, tokens: int | None, seconds: float | None
) -> AsyncGenerator[Delta, None]:
    deltas = engine.stream([1], SamplingParams(), RequestOptions(), request_id="r")
    return Pace(tokens=tokens, seconds=seconds).paced(
        deltas, Detokenizer(TokenBytes(TOKENIZER), [1])
    )


def assert_same_answer(left: Sequence[Delta], came: Sequence[Delta]) -> None:
    """All tokens, in order, each once, and what belongs to them."""
    for field in ("token_ids", "sources", "log_probs", "trees"):
        joined = [
            [one for delta in deltas for one in getattr(delta, field)] for deltas in (left, came)
        ]
        assert joined[0] == joined[1]
    assert "".join(delta.text for delta in left) == "".join(delta.text for delta in came)
    ends = [(delta.finish_reason, delta.metrics) for delta in left]
    assert ends == [(None, None)] * (len(left) - 1) + [("stop", METRICS)]
    assert [delta.prompt_log_probs for delta in left] == [(None,), *[None] * (len(left) - 1)]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    tokens=st.integers(1, 8),
    lag=st.integers(0, 4),
    letters=st.sampled_from(["abc", "aé", "漢字a"]),
)
async def test_every_delta_but_the_last_has_the_same_number_of_tokens(
    sizes: list[int], tokens: int, lag: int, letters: str
) -> None:
    text = (letters * 200).encode()[: sum(sizes)].decode(errors="ignore")
    text += "z" * (sum(sizes) - len(text.encode()))
    came = deltas_of(text, sizes, lag)
    left = [delta async for delta in paced(GivenEngine(came), tokens, None)]
    assert_same_answer(left, came)
    counts = [len(delta.token_ids) for delta in left]
    assert counts[:-1] == [tokens] * (len(left) - 1)
    assert 1 <= counts[-1] <= tokens
    if not lag:
        # A delta's text is that of its own tokens, but for characters that are not whole yet.
        for number, delta in enumerate(left[:-1]):
            whole = TOKENIZER.decode(TOKENIZER.encode(text)[: tokens * (number + 1)])
            given_out = "".join(one.text for one in left[: number + 1])
            assert given_out == whole.rstrip("\ufffd"), delta


@pytest.mark.parametrize("tokens", [None, 3])
async def test_deltas_leave_on_the_beat(tokens: int | None) -> None:
    came = deltas_of("abcdefgh" * 4, [1, 5, 2, 8, 9, 7])
    seconds = 0.25
    loop = asyncio.get_running_loop()
    # Just behind a beat, or the next one may come between two deltas of the engine.
    await asyncio.sleep(seconds - loop.time() % seconds)
    left, late = [], []
    async for delta in paced(GivenEngine(came), tokens, seconds):
        left.append(delta)
        late.append(int(loop.time() / seconds))
    assert_same_answer(left, came)
    if tokens is None:
        # The engine was quicker than the beat: all of it leaves at once.
        assert len(left) == 1
    assert late == sorted(set(late)), "two events in one beat"


async def test_a_slow_engine_gets_one_event_a_beat() -> None:
    class SlowEngine(GivenEngine):
        async def stream(self, *arguments: Any, **options: Any) -> AsyncGenerator[Delta, None]:
            async with aclosing(super().stream(*arguments, **options)) as deltas:
                async for delta in deltas:
                    await asyncio.sleep(0.01)
                    yield delta

    came = deltas_of("abcdefgh" * 3, [3, 1, 4, 2, 6, 8])
    loop, seconds = asyncio.get_running_loop(), 0.03
    left, beats = [], []
    async for delta in paced(SlowEngine(came), None, seconds):
        left.append(delta)
        beats.append(int(loop.time() / seconds))
    assert_same_answer(left, came)
    assert beats == sorted(set(beats)), "two events in one beat"


async def test_with_both_an_event_has_the_number_of_tokens_until_the_end() -> None:
    class OpenEngine(GivenEngine):
        """Ends when it is told to."""

        def __init__(self, deltas: Sequence[Delta]) -> None:
            super().__init__(deltas)
            self.go_on = asyncio.Event()

        async def stream(self, *arguments: Any, **options: Any) -> AsyncGenerator[Delta, None]:
            async with aclosing(super().stream(*arguments, **options)) as deltas:
                async for delta in deltas:
                    if delta.finish_reason is not None:
                        await self.go_on.wait()
                    yield delta

    came = deltas_of("abcdefgh" * 2, [5, 6, 4, 1])
    engine = OpenEngine(came)
    left = []
    async for delta in paced(engine, 4, 0.01):
        left.append(delta)
        if len(left) == 3:
            engine.go_on.set()
    assert_same_answer(left, came)
    assert [len(delta.token_ids) for delta in left] == [4, 4, 4, 4]


@pytest.mark.parametrize(("tokens", "seconds"), [(2, None), (None, 0.01), (2, 0.01)])
async def test_an_error_comes_after_what_came_before_it(
    tokens: int | None, seconds: float | None
) -> None:
    came = deltas_of("abcdef", [2, 2, 2])[:2]
    engine = GivenEngine(came, StageLost("gone"))
    stream = paced(engine, tokens, seconds)
    left: list[Delta] = []

    async def read() -> None:
        async for delta in stream:
            left.append(delta)

    with pytest.raises(StageLost, match="gone"):
        await read()
    assert "".join(delta.text for delta in left) == "abcd"


@pytest.mark.parametrize(("tokens", "seconds"), [(2, None), (None, 0.01), (2, 0.01)])
async def test_closing_a_paced_stream_closes_the_engines(
    tokens: int | None, seconds: float | None
) -> None:
    engine = FakeEngine(hold=asyncio.Event())
    stream = paced(engine, tokens, seconds)
    await anext(stream)
    await stream.aclose()
    assert engine.cancelled == ["r"]


async def test_nothing_is_read_ahead_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline.deploy.api.output.stream_pace.MAX_HELD_TOKENS", 8)
    came = deltas_of("a" * 400, [4] * 100)
    engine = GivenEngine(came)
    stream = paced(engine, 4, 0.001)
    first = await anext(stream)
    for _ in range(200):
        await asyncio.sleep(0)
    assert engine.is_closed_early, "the engine was read to its end before anybody read this"
    left = [first, *[delta async for delta in stream]]
    assert_same_answer(left, came)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("options", [{"stream_interval_tokens": 3}, {"stream_interval_ms": 5}])
async def test_the_api_streams_at_the_pace_that_is_set(
    serving: Any, options: dict[str, Any]
) -> None:
    body = {
        "prompt": ["a", "b"], "stream": True, "logprobs": 1, "max_tokens": 20,
        "stream_options": {"include_usage": True}, "speculative": {"report": True},
    }  # fmt: skip
    answers = []
    for settings in ({}, options):
        async with serving(FakeEngine(), **settings) as client:
            answers.append(events((await client.post("/v1/completions", json=body)).text))
    for index in range(2):
        texts = [
            "".join(
                one["choices"][0]["text"]
                for one in answer[:-1]
                if one["choices"][0]["index"] == index
            )
            for answer in answers
        ]
        assert texts[0] == texts[1] != ""
        counts = [
            len(one["choices"][0]["logprobs"]["tokens"])
            for one in answers[1][:-1]
            if one["choices"][0]["index"] == index
        ]
        assert sum(counts) == 20
        if "stream_interval_tokens" in options:
            assert counts == [3] * 6 + [2]
    assert answers[0][-1]["usage"] == answers[1][-1]["usage"]


@pytest.mark.parametrize("stop", [None, "e"])
async def test_a_real_engine_says_the_same_at_a_pace(checkpoint: Path, stop: str | None) -> None:
    config = EngineConfig(
        model=str(checkpoint), kv_cache_tokens=1024, drafters=(DrafterConfig(kind="prompt_lookup"),)
    )
    engine = AsyncEngine(config)
    await engine.start()
    try:
        params = SamplingParams(
            max_tokens=50, temperature=0.0, ignore_eos=True, stop=(stop,) if stop else ()
        )
        prompt = list(b"abcabcabc")
        plain = await engine.generate(prompt, params)
        text = Detokenizer(TokenBytes(engine.tokenizer), prompt)
        stream = Pace(tokens=4, seconds=None).paced(engine.stream(prompt, params), text)
        left = [delta async for delta in stream]
    finally:
        await engine.close()
    assert "".join(delta.text for delta in left) == plain.text
    assert [token for delta in left for token in delta.token_ids] == list(plain.token_ids)
    assert {len(delta.token_ids) for delta in left[:-1]} <= {4}


def test_no_pace_is_the_default() -> None:
    assert Pace.of(ServerConfig()) is None
    assert Pace.of(ServerConfig(stream_interval_tokens=8)) == Pace(tokens=8, seconds=None)
    assert Pace.of(ServerConfig(stream_interval_ms=50)) == Pace(tokens=None, seconds=0.05)
