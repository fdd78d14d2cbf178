"""Sequoia's trees of heads change no token, wherever the head drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.arrays import Int32
from draftline.core.proposals import Proposal
from draftline.core.request.sampling_params import RequestOptions
from draftline.core.tree.proposal_batch import num_right
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.drafters.model.sequoia import SequoiaShapes


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each draft that the text judged, how many tokens were right."""
    found: list[int] = []
    judge = SequoiaShapes.judge

    def noted(self: SequoiaShapes, tokens: Int32, parents: Int32, said: Sequence[int]) -> None:
        draft = Proposal("head", tokens, parents, np.zeros(len(tokens), dtype=np.float32))
        found.append(num_right(draft, np.array(said, dtype=np.int32)))
        judge(self, tokens, parents, said)

    monkeypatch.setattr(SequoiaShapes, "judge", noted)
    return found


@pytest.mark.parametrize(
    ("model", "options", "stages"),
    [
        pytest.param("demo-griffin", {}, 1, marks=pytest.mark.full),
        ("demo-griffin", {"placement": "actor"}, 2),
        pytest.param("demo-dflash", {"placement": "actor"}, 1, marks=pytest.mark.full),
        ("demo-dflash", {}, 2),
    ],
)
def test_trees_of_measured_shapes_change_no_token(
    model: str, options: dict[str, Any], stages: int, judged: list[int]
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
            # Every draft is judged by the text behind it, as the walk judged it.
            assert len(judged) > 0.7 * len(lengths)
            assert np.mean(judged) == pytest.approx(np.mean(lengths), rel=0.2)
            judged.clear()
