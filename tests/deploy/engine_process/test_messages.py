"""Messages between the engine's process and its API: what goes in comes out, garbage does not."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from draftline.core.errors import (
    CapacityError,
    DeviceLost,
    DrafterError,
    DraftlineError,
    EngineClosed,
    EngineFailed,
    ProtocolError,
    ReaderTooSlow,
    RequestError,
    RequestFailed,
    StageError,
    StageLost,
)
from draftline.core.request.allowed_tokens import StructuredOutput
from draftline.core.request.output import (
    Delta,
    RequestMetrics,
    StepTiming,
    TokenLogProb,
    VerifiedTree,
)
from draftline.core.request.sampling_params import RequestOptions, SamplingParams
from draftline.deploy.api.http.gate import Rate, TenantLimits, Verdict
from draftline.deploy.engine_process.messages import (
    Add,
    Beat,
    Cancel,
    Charge,
    Draining,
    EngineSetup,
    Enter,
    Failed,
    Health,
    Hello,
    Judged,
    Leave,
    NextDelta,
    RefusedRequest,
    Reply,
    Serving,
    StartDrain,
    StateQuestion,
    StoreFailed,
    TakeTokens,
    decode_from_api,
    decode_from_engine,
    encode_messages,
    packed_prompt,
)
from hypothesis import given
from hypothesis import strategies as st
from support.fakes.fake_engine import engine_stats

PARAMS = SamplingParams(
    max_tokens=None, temperature=0.5, seed=2**62, stop=("end", "\n"), stop_token_ids=(1, 2),
    logit_bias={3: -1.5, 70_000: 2.0}, allowed_token_ids=(4, 5), bad_words=("x y",), logprobs=3,
    min_tokens=0, structured_output=StructuredOutput(kind="regex", value="a+"),
)  # fmt: skip
OPTIONS = RequestOptions(
    namespace="acme", priority=-3, cache_salt="s\u00e9", drafters=("spectra",),
)  # fmt: skip
LOG_PROBS = (TokenLogProb(7, -0.25, (7, 8), (-0.25, -3.0)),)
METRICS = RequestMetrics(
    prompt_tokens=3, generated_tokens=2, num_steps=1, num_draft_tokens=4,
    drafted_by_source={"spectra": 4}, accepted_lengths=(0, 2), arrival_time=1.5,
)  # fmt: skip
DELTA = Delta(
    request_id="a", token_ids=(7,), sources=("spectra",), text="\u00e9", finish_reason="stop",
    metrics=METRICS, log_probs=LOG_PROBS, prompt_log_probs=(None, *LOG_PROBS), stop_reason="end",
    trees=(
        VerifiedTree(3, (7, 8), (-1, 0), ("spectra", "suffix"), (0.5, 0.25), (0,), 4,
                     StepTiming(("spectra",), 1.0, 0.5, 2.0, 0.25, 2.5)),
    ),
)  # fmt: skip
LIMITS = TenantLimits(tenant="acme", requests=3, tokens=9)
RATE = Rate(limit=9, remaining=0, reset_s=1.5, wait_s=math.inf)
FROM_API: list[Any] = [
    Add(1, "cmpl-1-0", packed_prompt([1, 2, 65_537]), PARAMS, OPTIONS),
    Cancel(1), StateQuestion(2, "metrics"), Serving(), Draining(3), Beat(),
    Enter(4, LIMITS, "r"), Leave(LIMITS, "r"), TakeTokens(5, LIMITS, 12), Charge(LIMITS, 3),
    RefusedRequest("acme", "tokens"), StoreFailed("tenants"),
]  # fmt: skip
FROM_ENGINE: list[Any] = [
    EngineSetup(b"{}", 30), Hello(512), Health(True), NextDelta(1, DELTA),
    Failed(1, "capacity", "full", retry_after_s=3), Reply(2, (engine_stats(),), b"text"),
    StartDrain(),
    Judged(4, Verdict(reason="tokens", rates={"tokens": RATE}, limit=9, wait_s=math.inf)),
]  # fmt: skip


def test_messages_come_out_as_they_went_in() -> None:
    assert decode_from_api(encode_messages(FROM_API)) == FROM_API
    assert decode_from_engine(encode_messages(FROM_ENGINE)) == FROM_ENGINE
    add = decode_from_api(encode_messages(FROM_API))[0]
    assert isinstance(add, Add)
    assert add.prompt_ids() == [1, 2, 65_537]


@pytest.mark.parametrize(
    "error",
    [
        RequestError("prompt[3]", "is wrong"), CapacityError("full"), ReaderTooSlow("slow"),
        StageError("a step"), StageLost("lost"), EngineFailed("failed"), EngineClosed("closed"),
        RequestFailed("internal"),
    ],
)  # fmt: skip
def test_errors_keep_their_kind(error: DraftlineError) -> None:
    if isinstance(error, CapacityError):
        error.retry_after_s = 9
    (message,) = decode_from_engine(encode_messages([Failed.of(4, error)]))
    assert isinstance(message, Failed)
    found = message.error()
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))


def test_other_errors_go_as_the_nearest_kind() -> None:
    assert type(Failed.of(1, DeviceLost("gone")).error()) is StageLost
    assert type(Failed.of(1, DrafterError("bad")).error()) is RequestFailed
    with pytest.raises(ProtocolError):
        Failed(1, "made up", "x").error()


def test_a_prompt_is_whole_numbers() -> None:
    for wrong in ([2**31], [-(2**40)], ["a"], [None]):
        with pytest.raises(RequestError, match="prompt"):
            packed_prompt(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProtocolError):
        Add(1, "a", b"abc", PARAMS, OPTIONS).prompt_ids()


def test_parameters_are_checked_again() -> None:
    data = msgspec.msgpack.decode(encode_messages(FROM_API[:1]))
    data[0][4]["temperature"] = -1.0
    # What was in the frame is nobody's to read.
    with pytest.raises(ProtocolError, match=r"^not a message between the engine and its API$"):
        decode_from_api(msgspec.msgpack.encode(data))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    for decode in (decode_from_api, decode_from_engine):
        with suppress(ProtocolError):
            assert isinstance(decode(data), list)


@given(st.data())
def test_a_damaged_frame_is_refused_or_messages(data: st.DataObject) -> None:
    kinds = (decode_from_api, FROM_API), (decode_from_engine, FROM_ENGINE)
    decode, messages = data.draw(st.sampled_from(kinds))
    frame = bytearray(encode_messages(messages))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:end])):
        found = []
        with suppress(ProtocolError):
            found = decode(damaged)
        assert {type(message) for message in found} <= {type(m) for m in messages}
