"""A dead stage ends its requests with a clear error, and the replica serves again by itself."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.errors import StageLost
from draftline.core.request_options import RequestOptions
from draftline.deploy.held_out_prompts import held_out_prompts
from support.processes import stage_pids

PROMPTS = [prompt.text for prompt in held_out_prompts(3)]
PARAMS = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_a_killed_stage_ends_its_requests_and_the_replica_recovers() -> None:
    config = EngineConfig(
        model="demo",
        backend="ray",
        pipeline_parallel_size=2,
        drafters=[DrafterConfig(kind="spectra", pool=False)],
    )
    with Engine(config) as engine:
        plain = engine.generate(PROMPTS, PARAMS, RequestOptions(speculative=False))
        errors: list[BaseException] = []

        def run() -> None:
            try:
                engine.generate(PROMPTS, PARAMS)
            except StageLost as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        before = engine.stats().num_steps
        thread.start()
        while engine.stats().num_steps < before + 5:
            time.sleep(0.002)
        os.kill(stage_pids()[-1], signal.SIGKILL)
        start = time.monotonic()
        thread.join(30)
        assert not thread.is_alive()
        assert len(errors) == 1
        assert "stage" in str(errors[0])
        assert time.monotonic() - start < 10
        deadline = time.monotonic() + 120
        while True:
            try:
                again = engine.generate(PROMPTS, PARAMS)
                break
            except StageLost:
                assert time.monotonic() < deadline, "the replica does not recover"
                time.sleep(0.2)
        assert [out.token_ids for out in again] == [out.token_ids for out in plain]
        assert engine.stats().num_running == 0
        assert engine.stats().kv_usage == 0
