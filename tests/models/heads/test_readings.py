"""Which fields of a head's config leave open how it is read, and what they may mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draftline.models.heads.load_head import load_readings, read_head_checkpoint
from support.inputs import head_checkpoints as published

EAGLE3 = published.eagle3("layers.0.")
NORMS = {f"fc_norm.{index}.weight": (published.HIDDEN,) for index in range(3)}
OF_SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": published.LLAMA,
    "draft_vocab_size": published.DRAFT_VOCAB,
}
P_EAGLE = {
    name: value
    for name, value in published.SPECULATORS_P_EAGLE.items()
    if name != "norm_before_residual"
}


@pytest.mark.parametrize(
    ("shapes", "config", "field"),
    [
        (EAGLE3, published.LLAMA, None),
        (EAGLE3, OF_SPECULATORS, "norm_before_residual"),
        (EAGLE3, OF_SPECULATORS | {"norm_before_residual": False}, None),
        # Files of speculators have EAGLE-3.1's meaning, as have those with its norms.
        (EAGLE3, OF_SPECULATORS | {"norm_before_residual": True, "norm_output": True}, None),
        (EAGLE3 | NORMS, published.LLAMA | {"norm_output": True}, None),
        (EAGLE3, published.LLAMA | {"norm_output": True}, "norm_output"),
        (EAGLE3, published.LLAMA | {"norm_output": False}, None),
        (published.p_eagle_of_speculators(), P_EAGLE, "norm_before_residual"),
        # Nothing goes on from what a mask says.
        (published.p_eagle(), published.P_EAGLE | {"norm_output": True}, None),
        (published.griffin(), published.LLAMA, None),
        (published.dspark(), published.DSPARK, None),
        (published.dflash_of_speculators(), published.SPECULATORS_DFLASH, None),
    ],
)
def test_what_a_config_does_not_say_has_two_readings(
    tmp_path: Path, shapes: published.Shapes, config: dict[str, Any], field: str | None
) -> None:
    folder = published.save(tmp_path, shapes, config)
    readings = read_head_checkpoint(folder).readings
    assert readings == (({field: True}, {field: False}) if field else ({},))
    heads = load_readings(folder)
    assert [one.reading for one in heads] == list(readings)
    if field:
        assert [getattr(one.head.config, field) for one in heads] == [True, False]
