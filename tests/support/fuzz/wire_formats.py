"""The wire formats: messages as they are sent, and who reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from draftline.benchmarks.step.host_work import Bench, HostLoad
from draftline.cluster.links import wire
from draftline.cluster.links.link import DrafterMessage, DrafterReport, DraftSeconds
from draftline.cluster.transport.messages import (
    FrameBuffer,
    StepReader,
    StepWriter,
    decode_result,
    encode_frame,
    encode_result,
)
from draftline.cluster.transport.step_codec.decoder import MAX_SLOTS
from draftline.core.errors import DraftlineError, StageError, StageLost
from draftline.core.proposals import (
    Commit,
    DraftDistributions,
    DraftRequest,
    FeatureRows,
    LogitsParams,
    Probe,
    Proposal,
    Query,
    TopNextTokens,
)
from draftline.core.request.output import Delta
from draftline.core.request.request import Request
from draftline.core.request.sampling_params import RequestOptions, SamplingParams
from draftline.core.request.stop import SilentStream, StopRule
from draftline.core.step.builder import load_kernels
from draftline.core.steps import LogProbOutput, StepInput, StepOutput
from draftline.deploy.engine_process.messages import (
    Add,
    Beat,
    Cancel,
    Failed,
    NextDelta,
    StateQuestion,
    decode_from_api,
    decode_from_engine,
    encode_messages,
)

NUM_TOKENS = 10
KINDS = (
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_k=20, top_p=0.9, seed=1),
    SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.0, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.5, logit_bias={3: 2.0, 5: -1.0}, seed=2,
    ),
    SamplingParams(max_tokens=NUM_TOKENS, banned_token_ids=(7,), min_tokens=3, seed=3),
)  # fmt: skip


async def recorded_steps() -> list[StepInput]:
    """All steps of five requests: two greedy ones beside the first of other kinds."""
    load_kernels()
    bench = Bench(HostLoad(requests=2, nodes=6), NUM_TOKENS)
    steps: list[StepInput] = []
    submit = bench.pipeline.submit

    def record(step: StepInput) -> Awaitable[StepOutput]:
        steps.append(step)
        return submit(step)

    bench.pipeline.submit = record
    for number, params in enumerate(KINDS):
        prompt = np.arange(100 * number, 100 * number + 20, dtype=np.int32)
        request = Request(f"shaped-{number}", prompt, params, params.seed or 0, NUM_TOKENS, _ignore)
        bench.core.add(request, StopRule(params, (), NUM_TOKENS, SilentStream()))
        while bench.core.has_work:
            await bench.core.step()
    return steps


def _ignore(_event: Delta | DraftlineError) -> None:
    """What is answered does not matter."""


TOKENS = np.arange(5, 29, dtype=np.int32)
PARENTS = np.array([-1, 0, 1, 0], dtype=np.int32)
SHAPED = LogitsParams(
    top_k=20,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    logit_bias={3: 1.5, 70: -2.0},
    allowed_token_ids=(5, 6, 7),
    banned_token_ids=(9,),
)
OPENED = DraftRequest("one", TOKENS, 20, 0.7, 2**40, "tenant", SHAPED, (2, 3), "salt")
COMMIT = Commit(
    "one", 24, np.array([4, 5], dtype=np.int32), np.ones((2, 3), dtype=np.int32),
    TopNextTokens(np.array([4, 5], dtype=np.int32), np.ones((2, 4), dtype=np.int32)),
)  # fmt: skip
FEATURES = [FeatureRows("one", 24, np.ones((2, 8), dtype=np.float32))]
ANSWERED = DrafterMessage(
    9, (), (), (), [Query("one", 26, 8), Query("two", 5, 0, (1, 2), 0.01)], 0.0
)
STEPS = (
    DrafterMessage(
        1, ("gone",), (OPENED, DraftRequest("two", TOKENS[:3], 3, 0.0, 1)), [COMMIT],
        [Query("one", 24, 8), Query("two", 3, 4)], 0.0, [COMMIT], FEATURES,
    ),
    ANSWERED,
)  # fmt: skip
LOG_PROBS = np.array([-0.1, -0.5, -1.0, -2.0], dtype=np.float32)
PROPOSALS = [
    Proposal(
        "x", TOKENS[:4], PARENTS, LOG_PROBS,
        Probe(
            TOKENS[:2], np.array([1, 2], dtype=np.int32), np.eye(2, dtype=np.bool_),
            np.array([1], dtype=np.int32), 4,
        ),
        2,
        DraftDistributions(np.ones((4, 2), dtype=np.int32), np.full((4, 2), 0.5, np.float32)),
    ),
    Proposal("x", TOKENS[:0], TOKENS[:0], LOG_PROBS[:0]),
]  # fmt: skip


MAX_BYTES = 1 << 24
# A stage keeps the block tables of as many requests as a message may name, with some columns more
# than it has.
KEPT_BY_STAGES = 2 * MAX_SLOTS * 4 * 128


@dataclass(frozen=True, slots=True)
class Format:
    """What is sent, and a reader, which raises one of the tree's own errors for what is none.

    read        gets one message; what it keeps between messages is begun anew with each
    max_memory  bytes that reading one may take
    """

    name: str
    messages: Sequence[bytes]
    read: Callable[[bytes], object]
    max_memory: int = 16 * 2**20


def formats() -> list[Format]:
    """All of them, with messages made anew."""
    return [*_drafters(), *_stages(), *_engine_process()]


def _drafters() -> list[Format]:
    hello = wire.Greeting("engine", None)
    steps = [wire.encode_step(step, 0.05, MAX_BYTES) for step in STEPS]
    parts = [*steps, wire.encode_more_features(FEATURES, MAX_BYTES)]
    report = DrafterReport(10**6, {"texts": 3})
    answers = [
        wire.encode_answer(ANSWERED, PROPOSALS, MAX_BYTES, report, DraftSeconds(0.1, 0.2, 0.3)),
        wire.encode_error(ANSWERED.sequence, "it failed"),
    ]
    return [
        Format("drafter: hello", [wire.encode_hello(hello)], wire.decode_hello),
        Format("drafter: step", parts, lambda data: wire.decode_part(data, 0.0)),
        Format("drafter: answer", answers, lambda data: wire.decode_answer(data, ANSWERED, "x")),
    ]


def _stages() -> list[Format]:
    steps = asyncio.run(recorded_steps())
    answers = [
        encode_result(3, _output(steps[-1])),
        encode_result(4, StageError("of one step")),
        encode_result(5, StageLost("gone")),
    ]
    return [
        Format("stage: first step", [_first(step) for step in steps], _read_first, KEPT_BY_STAGES),
        Format("stage: steps", [_frames(steps)], _read_frames, KEPT_BY_STAGES),
        Format("stage: answer", answers, decode_result),
    ]


def _output(step: StepInput) -> StepOutput:
    count = len(step.logits_rows)
    return StepOutput(
        step_id=step.step_id,
        target_tokens=np.arange(count, dtype=np.int32),
        probe_ids=np.zeros((2, 4), dtype=np.int32),
        log_probs=LogProbOutput(scores=np.zeros(count, dtype=np.float32)),
    )


def _first(step: StepInput) -> bytes:
    return StepWriter(7).write(0, step).whole


def _read_first(data: bytes) -> object:
    return StepReader().read(data)


def _frames(steps: Sequence[StepInput]) -> bytes:
    """All that a connection carries: each step against those before it."""
    writer = StepWriter(7)
    frames = [encode_frame(writer.write(number, step).whole) for number, step in enumerate(steps)]
    return b"".join(frames)


def _read_frames(data: bytes) -> object:
    reader, count = StepReader(), 0
    for message in FrameBuffer().feed(data):
        reader.read(message)
        count += 1
    return count


def _engine_process() -> list[Format]:
    params = SamplingParams(max_tokens=4, stop=("end",), logit_bias={3: 1.0}, seed=1)
    from_api = [
        encode_messages(
            [
                Beat(),
                Add(1, "request", b"\1\0\0\0\2\0\0\0", params, RequestOptions()),
                Cancel(1),
                StateQuestion(2, "stats"),
            ]
        )
    ]
    from_engine = [
        encode_messages(
            [
                NextDelta(1, Delta("request", (5, 6), ("suffix", "suffix"), "text")),
                Failed(2, "request", "must be a number", "seed"),
            ]
        )
    ]
    return [
        Format("API process: to the engine", from_api, _read_api),
        Format("API process: from the engine", from_engine, _read_engine),
    ]


def _read_api(data: bytes) -> object:
    messages = decode_from_api(data)
    for message in messages:
        if isinstance(message, Add):
            message.prompt_ids()
    return messages


def _read_engine(data: bytes) -> object:
    messages = decode_from_engine(data)
    for message in messages:
        if isinstance(message, Failed):
            message.error()
    return messages
