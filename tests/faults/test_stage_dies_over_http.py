"""What a client of the API sees of a dead stage and of a dead coordinator on Ray Serve."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from draftline.deploy.cli.demo.held_out_prompts import held_out_prompts
from support.servers.processes import coordinator_pids, stage_pids
from support.servers.served_model import served_model

PROMPT = held_out_prompts(1)[0].text


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_behind_http_requests_outlive_a_stage_and_stages_their_coordinator() -> None:
    settings = ("demo", "--backend", "ray", "-pp", "2", "--speculative-config", "[]")
    with served_model(*settings) as served:
        client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=120)

        def complete() -> str:
            answer = client.completions.create(
                model="demo", prompt=PROMPT, max_tokens=400, temperature=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return answer.choices[0].text

        before = complete()
        with ThreadPoolExecutor() as pool:
            running = pool.submit(complete)
            time.sleep(1)
            os.kill(stage_pids()[-1], signal.SIGKILL)
            assert running.result(120) == before
            running = pool.submit(complete)
            time.sleep(1)
            stages = stage_pids()
            (coordinator,) = coordinator_pids()
            os.kill(coordinator, signal.SIGKILL)
            # The replica that Ray Serve starts in its place goes on with it.
            assert running.result(120) == before
        # One that does not end in time what it does, on a busy machine, is replaced.
        assert set(stage_pids()) & set(stages), "no stage outlived its coordinator"
