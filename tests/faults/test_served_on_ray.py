"""A client of a server on Ray: its answers, a dead stage, a dead coordinator, and the end.

In this order, and of one server: it takes its time to start.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from draftline.deploy.cli.demo.prompts import held_out_prompts
from support.contracts.client_contract import check_client
from support.servers.processes import coordinator_pids, stage_pids
from support.servers.served_model import ServedModel, served_model
from support.servers.stopped_streams import WHOLE, streams_through_sigterm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

KEY = "secret"
PROMPT = held_out_prompts(1)[0].text


@pytest.fixture(scope="module")
def served() -> Iterator[ServedModel]:
    arguments = ["demo", "--served-model-name", "tiny", "--backend", "ray", "-pp", "2"]
    arguments += ["--api-key", KEY, "--speculative-config", '[{"kind": "spectra"}]']
    with served_model(*arguments, "--drain-timeout", "60") as served:
        yield served


def complete(served: ServedModel) -> str:
    """A text that takes its time: without drafts."""
    client = openai.OpenAI(base_url=served.url, api_key=KEY, max_retries=0, timeout=120)
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=400, temperature=0,
        extra_body={"ignore_eos": True, "speculative": {"enabled": False}},
    )  # fmt: skip
    return answer.choices[0].text


def test_answers_and_errors_are_those_of_any_server(served: ServedModel) -> None:
    # What is started, that it is a toy, that calls of tools are not known, Ray, the address.
    assert len(served.lines) <= 5
    check_client(served.url, KEY)


def test_requests_outlive_a_stage_and_stages_their_coordinator(served: ServedModel) -> None:
    before = complete(served)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(complete, served)
        time.sleep(1)
        os.kill(stage_pids()[-1], signal.SIGKILL)
        assert running.result(120) == before
        running = pool.submit(complete, served)
        time.sleep(1)
        stages = stage_pids()
        (coordinator,) = coordinator_pids()
        os.kill(coordinator, signal.SIGKILL)
        # The replica that Ray Serve starts in its place goes on with it.
        assert running.result(120) == before
    # One that does not end in time what it does, on a busy machine, is replaced.
    assert set(stage_pids()) & set(stages), "no stage outlived its coordinator"


def test_streams_end_whole_after_sigterm(served: ServedModel) -> None:
    assert streams_through_sigterm(served, KEY) == WHOLE
    assert served.process.stdout is not None
    printed = served.process.stdout.read().splitlines()
    assert printed.pop() == "stopped", printed
    # Ray tells of each process that was killed, in few words.
    deaths = [line for line in printed if line.startswith("(raylet)")]
    assert all(re.fullmatch(r"\(raylet\) process \d+ died: .{1,200}", line) for line in deaths)
    # Of the stage there is one line of ours, and nothing else of any process.
    [line] = [line for line in printed if "stage" in line]
    said = r"event=stage_replaced stage=[01] reason='.+' seconds=[\d.]+ requests=1$"
    assert re.search(said, line), line
    assert served.process.wait(60) == 0
