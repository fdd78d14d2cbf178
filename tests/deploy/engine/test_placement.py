"""A drafter that cannot start ends the start of the engine, with the drafter and the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from draftline.cluster.config import EngineConfig
from draftline.cluster.engine.assembly import plan_model
from draftline.core.errors import ConfigError
from draftline.deploy.engine.placement import Placement
from support.fakes.recorded_progress import RecordedProgress
from transformers import AutoModelForCausalLM

WRONG_DRAFTERS = [
    ({"kind": "prompt_lookup", "max_ngarm": 2}, "did you mean 'max_ngram'"),
    ({"kind": "retrieval", "store": "/nowhere/store"}, "/nowhere/store"),
    ({"kind": "retrieval"}, "must be given"),
    (
        {"kind": "model", "model": "demo-drafter-other-vocab", "vocabulary": "same"},
        "another tokenizer",
    ),
]


async def start(drafter: dict[str, object]) -> None:
    good = {"kind": "spectra", "transport": "inproc"}
    config = EngineConfig.model_validate({"model": "demo", "drafters": [good, drafter]})
    placement = Placement(config)
    try:
        await placement.make_drafters()
    finally:
        placement.close()


@pytest.mark.parametrize("transport", ["inproc", pytest.param("grpc", marks=pytest.mark.full)])
@pytest.mark.parametrize(("drafter", "message"), WRONG_DRAFTERS)
async def test_a_drafter_that_cannot_start_is_named(
    drafter: dict[str, object], message: str, transport: str
) -> None:
    with pytest.raises(ConfigError, match=rf"drafters\[1\].*{re.escape(message)}"):
        await start({**drafter, "transport": transport})


@pytest.mark.full
async def test_a_redis_that_is_not_there_is_named(tmp_path: Path) -> None:
    url = "redis://127.0.0.1:1/0"
    with pytest.raises(ConfigError, match=r"drafters\[1\].*127\.0\.0\.1:1"):
        await start({"kind": "retrieval", "store": url, "transport": "grpc"})


def test_loading_tells_how_far_the_weights_of_each_stage_are(checkpoint: Path) -> None:
    config = EngineConfig(model=str(checkpoint), pipeline_parallel_size=2, compile="off")
    progress = RecordedProgress()
    Placement(config, progress=progress).make_pipeline(plan_model(config).specs)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    # The embedding is the head, too: the first stage has it, and the last.
    whole = (model.num_parameters() + model.lm_head.weight.numel()) / 1e6
    assert [work.label for work in progress.works] == ["loading weights"] * 2
    assert sum(work.total or 0 for work in progress.works) == pytest.approx(whole)
    assert [work.done for work in progress.works] == pytest.approx(
        [work.total for work in progress.works]
    )
