"""Servers of a pool that die, pause or slow down under eight streams cost speed only."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts
from support.servers.processes import drafter_pids, send_signal

PROMPTS = [prompt.text for prompt in held_out_prompts(8)]
PARAMS = SamplingParams(max_tokens=160, temperature=0.0, ignore_eos=True)
# It is asked in every step, and plain steps take a token, however quick the machine is.
CONFIG = EngineConfig(
    model="demo",
    drafters=[DrafterConfig(kind="model", model="demo-drafter", transport="grpc", servers=2)],
    node_budget="full",
    multi_step_ms=0,
    draft_deadline_ms=200,
)


@contextlib.contextmanager
def killed(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGKILL)
    yield


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    send_signal(pid, signal.SIGSTOP)
    yield
    # The engine may have replaced it.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[None]:
    """It runs for a fiftieth of the time."""
    is_over = threading.Event()

    def stop_and_go() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not is_over.is_set():
                send_signal(pid, signal.SIGSTOP)
                is_over.wait(0.25)
                os.kill(pid, signal.SIGCONT)
                is_over.wait(0.005)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(CONFIG) as engine:
        yield engine
    assert drafter_pids() == []


def num_moved(engine: Engine) -> int:
    return engine.stats().drafters[0].moved


def num_servers(engine: Engine) -> int:
    return engine.stats().drafters[0].servers


def accepted(outputs: list[RequestOutput]) -> int:
    return sum(output.metrics.num_accepted_tokens for output in outputs)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def generate_beside(
    engine: Engine, disturbance: contextlib.AbstractContextManager[None]
) -> tuple[list[RequestOutput], int]:
    """Answers of all prompts, and how many requests moved while one server was disturbed."""
    outputs: list[RequestOutput] = []
    before, steps = num_moved(engine), engine.stats().num_steps
    thread = threading.Thread(target=lambda: outputs.extend(engine.generate(PROMPTS, PARAMS)))
    thread.start()
    until(lambda: engine.stats().num_steps > steps + 10, "decoding does not go on")
    with disturbance:
        until(lambda: num_moved(engine) > before or not thread.is_alive(), "no step ends")
        thread.join(120)
    assert not thread.is_alive(), "a request is lost"
    return outputs, num_moved(engine) - before


@pytest.mark.net
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "disturbed",
    [
        pytest.param(slowed, id="slowed", marks=pytest.mark.full),
        pytest.param(paused, id="paused"),
        pytest.param(killed, id="killed"),
    ],
)
def test_texts_stay_as_they_are_and_requests_move(
    engine: Engine, disturbed: Callable[[int], contextlib.AbstractContextManager[None]]
) -> None:
    plain = engine.generate(PROMPTS, PARAMS, RequestOptions(speculative=False))
    until(lambda: accepted(engine.generate(PROMPTS, PARAMS)) > 0, "nothing is drafted")
    # On a busy machine all requests may be with one server: then it is the other one's turn.
    for turn in range(8):
        # Both are well again, not only started: requests need somewhere to go.
        until(lambda: num_servers(engine) == 2, "a server does not come back")
        pid = drafter_pids()[turn % 2]
        outputs, moved = generate_beside(engine, disturbed(pid))
        assert [one.token_ids for one in outputs] == [one.token_ids for one in plain]
        if moved:
            break
    assert moved
    until(lambda: accepted(engine.generate(PROMPTS, PARAMS)) > 0, "nothing is drafted any more")
