"""What dies beside the target costs speed only: no text changes and no request is lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.retrieval_store.serving.open_store import open_store
from support.servers.processes import drafter_pids, send_signal
from support.servers.redis_server import RedisServer

PROMPTS = [prompt.text for prompt in held_out_prompts(4)]
PARAMS = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)


def generate_while(engine: Engine, disturb: Callable[[], None]) -> list[RequestOutput]:
    """Answers of all prompts, with `disturb` called while they are being decoded."""
    outputs: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: outputs.extend(engine.generate(PROMPTS, PARAMS)))
    before = engine.stats().num_steps
    thread.start()
    deadline = time.monotonic() + 30
    while engine.stats().num_steps < before + 10:
        assert time.monotonic() < deadline, "decoding does not go on"
        time.sleep(0.001)
    disturb()
    assert engine.stats().num_running > 0, "the disturbance came too late"
    thread.join(120)
    assert not thread.is_alive(), "a request is lost"
    return outputs


def drafted_steps(drafter: DrafterConfig) -> EngineConfig:
    """It is asked in every step, and plain steps take a token, however quick the machine is.

    Several steps of each request are on their way.
    """
    return EngineConfig(
        model="demo", drafters=[drafter], node_budget="full", multi_step_ms=0,
        pipeline_parallel_size=2, pipelined_trees="on",
    )  # fmt: skip


def token_ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


SPECTRA = DrafterConfig(kind="spectra", pool=False, transport="grpc")
# It knows the target's states of what was committed since it came back, and no others.
HEAD = DrafterConfig(kind="head", model="demo-griffin", transport="grpc")
KILLED, PAUSED = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.net
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("drafter", "numbers"),
    [
        pytest.param(SPECTRA, (KILLED, PAUSED), id="spectra"),
        pytest.param(HEAD, (KILLED,), id="head", marks=pytest.mark.full),
        pytest.param(HEAD, (PAUSED,), id="paused head", marks=pytest.mark.full),
    ],
)
def test_a_killed_and_a_paused_drafter_server_come_back_and_change_nothing(
    drafter: DrafterConfig, numbers: tuple[signal.Signals, ...]
) -> None:
    config = drafted_steps(drafter)
    with Engine(config) as engine:
        plain = engine.generate(PROMPTS, PARAMS, RequestOptions(speculative=False))
        for number in numbers:
            (before,) = drafter_pids()
            drafted = generate_while(engine, lambda: send_signal(before, number))  # noqa: B023
            assert token_ids(drafted) == token_ids(plain)
            # A server that hangs as it starts is given up after a minute, and started again.
            deadline = time.monotonic() + 180
            accepted = 0
            while not accepted or drafter_pids() == [before]:
                assert time.monotonic() < deadline, "the drafter does not come back"
                again = engine.generate(PROMPTS[:1], PARAMS)
                assert token_ids(again) == token_ids(plain[:1])
                accepted = sum(output.metrics.num_accepted_tokens for output in again)
    assert drafter_pids() == []


@pytest.mark.redis
def test_a_killed_redis_changes_nothing(redis_server: RedisServer) -> None:
    demo, shared = open_store("demo"), open_store(redis_server.url)
    for segment_id in demo.manifest().segment_ids("shared"):
        shared.put("shared", demo.get("shared", segment_id))
    config = drafted_steps(DrafterConfig(kind="retrieval", store=redis_server.url))
    with Engine(config) as engine:
        plain = engine.generate(PROMPTS, PARAMS, RequestOptions(speculative=False))
        drafted = generate_while(engine, redis_server.kill)
        assert token_ids(drafted) == token_ids(plain)
        # The lookups are served from memory.
        assert token_ids(engine.generate(PROMPTS, PARAMS)) == token_ids(plain)
        assert sum(output.metrics.num_accepted_tokens for output in drafted) > 0
