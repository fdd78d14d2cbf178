"""Stages that hand on sums of what a head reads: no token differs, and hardly a draft."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.cluster.engine.assembly import plan_model
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.held_out_prompts import held_out_prompts

PROMPTS = [prompt.text for prompt in held_out_prompts()[:4]]


def answers(config: EngineConfig) -> list[RequestOutput]:
    """Greedy and sampled answers with drafts, which are those without."""
    found = []
    with Engine(config) as engine:
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=32)
            plain = engine.generate(PROMPTS, params, options=RequestOptions(speculative=False))
            drafted = engine.generate(PROMPTS, params)
            assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
            found += drafted
    return found


def config_of(name: str, features: str, **settings: Any) -> EngineConfig:
    drafter = DrafterConfig(kind="head", model=name)
    return EngineConfig(
        model="demo", drafters=(drafter,), node_budget="full", head_features=features,
        enable_prefix_caching=False, **settings,
    )  # fmt: skip


def width(config: EngineConfig) -> int:
    """Columns of a row that its stages hand on."""
    return sum(spec.output_size for spec in plan_model(config).specs[:-1])


def check_alike(by_states: EngineConfig, by_sums: EngineConfig) -> None:
    """No answer differs from plain decoding's, and hardly a draft from one to the other."""
    assert width(by_sums) < width(by_states)
    outputs = [answers(by_states), answers(by_sums)]
    assert [one.token_ids for one in outputs[0]] == [one.token_ids for one in outputs[1]]
    lengths = [[one.metrics.accepted_lengths for one in each] for each in outputs]
    # Sums add in another order, so that near-ties may swap.
    assert np.mean([mine == theirs for mine, theirs in zip(*lengths, strict=True)]) > 0.5
    means = [np.mean(np.concatenate(each)) for each in lengths]
    assert means[1] == pytest.approx(means[0], rel=0.05)
    assert means[0] > 0.4


@pytest.mark.parametrize(("name", "stages"), [("demo-dflash", 2), ("demo-specformer", 3)])
def test_sums_change_no_token_and_drafts_are_as_by_states(name: str, stages: int) -> None:
    states, sums = (
        config_of(name, features, pipeline_parallel_size=stages) for features in ("states", "sums")
    )
    check_alike(states, sums)


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("name", "stages"),
    [("demo-dflash", 2), pytest.param("demo-specformer", 3, marks=pytest.mark.full)],
)
def test_sums_between_processes_are_those_between_threads(name: str, stages: int) -> None:
    """Stages of Ray actors send sums as wide as their links expect, and heads read them as
    such: what drafts states of this process is drafted."""
    near = config_of(name, "states", pipeline_parallel_size=stages)
    far = config_of(
        name, "sums", pipeline_parallel_size=stages, backend="ray", standby_stages=0,
    )  # fmt: skip
    check_alike(near, far)
