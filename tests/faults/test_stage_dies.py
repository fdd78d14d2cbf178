"""A lost stage is replaced beside those that live; its requests go on, their texts are whole."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.cluster.engine.request_factory import Prompt
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts
from support.servers.processes import is_alive, send_signal, stage_pids
from support.servers.ray_cluster import living_actors
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from support.tools.tiny_tokenizers import single_bytes

PROMPTS: dict[str, list[Prompt]] = {
    "demo": [prompt.text for prompt in held_out_prompts(2)],
    # Its layers keep states.
    "qwen3_next": np.random.default_rng(5).integers(2, VOCAB_SIZE, (2, 40)).tolist(),
}
GREEDY = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
PARAMS = [
    GREEDY,
    replace(GREEDY, temperature=0.9, top_p=0.95, seed=3),
    replace(GREEDY, temperature=0.7, seed=4, frequency_penalty=0.4, logprobs=1),
]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=["demo", pytest.param("qwen3_next", marks=pytest.mark.full)])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(
    ray_cluster: None, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = Path(model)
    if model != "demo":
        folder = save_tiny_model(model, tmp_path_factory.mktemp("hybrid"))
        single_bytes().save_pretrained(folder)
    config = EngineConfig(
        model=str(folder),
        backend="ray",
        pipeline_parallel_size=2,
        step_timeout_s=2.0,
        # Where a machine does more than this, a spare worker takes its time.
        recovery_timeout_s=300.0,
        # With several steps of each request on their way.
        pipelined_trees="on",
        drafters=[DrafterConfig(kind="spectra", pool=False)],
    )
    with Engine(config) as engine:
        yield engine
    deadline = time.monotonic() + 30
    while living_actors("StageWorker"):
        assert time.monotonic() < deadline, "a stage or a spare worker is left behind"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.full), signal.SIGSTOP]
)
def test_requests_of_a_lost_stage_go_on_with_its_successor(
    engine: Engine, model: str, number: signal.Signals
) -> None:
    prompts, is_plain = PROMPTS[model], RequestOptions(speculative=False)
    with ThreadPoolExecutor() as pool:
        plain = list(pool.map(lambda one: engine.generate(prompts, one, is_plain), PARAMS))
        before = engine.stats().num_steps
        asked = [pool.submit(engine.generate, prompts, params) for params in PARAMS]
        kill_a_stage(engine, before, number)
        outputs = [future.result() for future in asked]
    for ours, theirs in zip(outputs, plain, strict=True):
        assert [out.token_ids for out in ours] == [out.token_ids for out in theirs]
        assert [out.text for out in ours] == [out.text for out in theirs]
        assert log_probs(ours) == pytest.approx(log_probs(theirs), abs=1e-4)
    assert engine.health() == "ready"
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)


def log_probs(outputs: Sequence[RequestOutput]) -> list[float]:
    return [entry.log_prob for output in outputs for entry in output.log_probs]


def kill_a_stage(engine: Engine, before: int, number: signal.Signals) -> None:
    """The last one, some steps after `before`; returns when it is replaced."""
    while engine.stats().num_steps < before + 5:
        time.sleep(0.002)
    stays, victim = stage_pids()
    held = num_held(stays)
    send_signal(victim, number)
    wait_until(lambda: engine.health() != "ready")
    wait_until(lambda: engine.health() == "ready")
    assert stays in stage_pids()
    assert not is_alive(victim)
    # A group of stages has 13 descriptors and 4 threads.
    assert num_held(stays) < held + 8, "it keeps its link to a stage that is gone"


def num_held(pid: int) -> int:
    """Descriptors and threads of a process."""
    return sum(len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("fd", "task"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "health did not turn"
        time.sleep(0.01)
