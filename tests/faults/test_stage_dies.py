"""A lost stage is replaced beside those that live; its requests go on, their texts are whole."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.held_out_prompts import held_out_prompts
from support.servers.processes import is_alive, stage_pids
from support.servers.ray_cluster import living_actors

PROMPTS = [prompt.text for prompt in held_out_prompts(3)]
PARAMS = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def engine(ray_cluster: None) -> Iterator[Engine]:
    config = EngineConfig(
        model="demo",
        backend="ray",
        pipeline_parallel_size=2,
        step_timeout_s=2.0,
        # With several steps of each request on their way.
        streaming="on",
        drafters=[DrafterConfig(kind="spectra", pool=False)],
    )
    with Engine(config) as engine:
        yield engine
    deadline = time.monotonic() + 30
    while living_actors("StageWorker"):
        assert time.monotonic() < deadline, "a stage or a spare worker is left behind"
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_of_a_lost_stage_go_on_with_its_successor(
    engine: Engine, number: signal.Signals
) -> None:
    plain = engine.generate(PROMPTS, PARAMS, RequestOptions(speculative=False))
    outputs: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: outputs.extend(engine.generate(PROMPTS, PARAMS)))
    before = engine.stats().num_steps
    thread.start()
    while engine.stats().num_steps < before + 5:
        time.sleep(0.002)
    stays, victim = stage_pids()
    os.kill(victim, number)
    unhealthy = False
    while thread.is_alive():
        unhealthy = unhealthy or not engine.is_healthy()
        thread.join(0.01)
    assert unhealthy, "health was never false"
    assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]
    assert stays in stage_pids()
    assert not is_alive(victim)
    assert engine.health() == "ready"
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
