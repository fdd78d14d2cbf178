"""Sequoia's trees of heads change no token, wherever the head drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.held_out_prompts import held_out_prompts


@pytest.mark.parametrize(
    ("model", "options", "stages"),
    [
        ("demo-griffin", {}, 1),
        ("demo-griffin", {"placement": "actor"}, 2),
        ("demo-dflash", {"placement": "actor"}, 1),
        ("demo-dflash", {"tree_size": "full"}, 2),
    ],
)
def test_trees_of_measured_shapes_change_no_token(
    model: str, options: dict[str, Any], stages: int
) -> None:
    drafter = DrafterConfig(kind="head", model=model, tree="sequoia", **options)
    config = EngineConfig(
        model="demo", drafters=(drafter,), node_budget="full", pipeline_parallel_size=stages,
        draft_deadline_ms=5000,
    )  # fmt: skip
    prompts = [prompt.text for prompt in held_out_prompts()[:5]]
    with Engine(config) as engine:
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=32)
            plain = engine.generate(prompts, params, options=RequestOptions(speculative=False))
            drafted = engine.generate(prompts, params)
            assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
            lengths = [length for one in drafted for length in one.metrics.accepted_lengths]
            # How wide and deep trees are follows the machine's times.
            assert np.mean(lengths) > 0.2
