"""Stages that hand on sums of what a head reads: no token differs, and hardly a draft."""

from __future__ import annotations

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


@pytest.mark.parametrize(("name", "stages"), [("demo-dflash", 2), ("demo-specformer", 3)])
def test_sums_change_no_token_and_drafts_are_as_by_states(name: str, stages: int) -> None:
    outputs, widths = [], []
    for features in ("states", "sums"):
        config = EngineConfig(
            model="demo", drafters=(DrafterConfig(kind="head", model=name),), node_budget="full",
            pipeline_parallel_size=stages, head_features=features, enable_prefix_caching=False,
        )  # fmt: skip
        widths.append([spec.output_size for spec in plan_model(config).specs[:-1]])
        outputs.append(answers(config))
    assert sum(widths[1]) < sum(widths[0])
    lengths = [[one.metrics.accepted_lengths for one in each] for each in outputs]
    # Sums add in another order, so that near-ties may swap.
    assert np.mean([mine == theirs for mine, theirs in zip(*lengths, strict=True)]) > 0.5
    means = [np.mean(np.concatenate(each)) for each in lengths]
    assert means[1] == pytest.approx(means[0], rel=0.05)
    assert means[0] > 0.4
