"""Every published kind of drafter is told from the others by its tensors and config."""

from __future__ import annotations

from typing import Any

import pytest
from draftline.core.errors import CheckpointError
from draftline.models.heads.checkpoint_kind import CheckpointKind, checkpoint_kind
from draftline.models.heads.head_tensors import plain_name
from support.inputs import head_checkpoints as published

DOMINO = {"prefix_gru.weight_ih_l0": (3, 4)}
MARKOV = {"markov_head.markov_w1.weight": (40, 4)}
MASK = {"mask_hidden": (1, 1, 48)}
MEDUSA = {"0.0.linear.weight": (16, 16), "0.1.weight": (40, 16), "1.0.linear.weight": (16, 16)}


def plain(shapes: dict[str, Any]) -> dict[str, Any]:
    return {plain_name(name): shape for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("shapes", "config", "kind"),
    [
        (published.eagle(), published.LLAMA, "eagle"),
        (published.fspad(), {}, "fspad"),
        (published.griffin(), {}, "griffin"),
        (published.eagle3(), {}, "eagle3"),
        (published.eagle3("layers.0."), {"speculators_model_type": "eagle3"}, "eagle3"),
        (published.deep_eagle3(), {}, "eagle3"),
        (published.eagle3() | MASK, {}, "p_eagle"),
        (published.eagle3(), {"parallel_drafting": True}, "p_eagle"),
        (published.dflash(), {}, "dflash"),
        (published.dflash() | {"candidate_selector.predecessor_codebook": (9, 4)}, {}, "dflash2"),
        (published.dflash(), {"architectures": ["DFlash2DraftModel"]}, "dflash2"),
        (published.dflash() | DOMINO, {}, "domino"),
        (published.dflash(), {"dflash_config": {"projector_type": "domino"}}, "domino"),
        (published.dflash() | MARKOV, {}, "dspark"),
        (published.dflash(), {"architectures": ["Qwen3DSparkModel"]}, "dspark"),
        (published.spec_former(), {}, "specformer"),
        (MEDUSA, {"medusa_num_heads": 2}, "medusa"),
        ({"model.embed_tokens.weight": (40, 16)}, published.LLAMA, "causal_lm"),
    ],
)
def test_each_kind_is_told_by_what_only_it_has(
    shapes: dict[str, Any], config: dict[str, Any], kind: str
) -> None:
    assert checkpoint_kind(plain(shapes), config) is CheckpointKind(kind)
    wrapped = {f"model.{name}": shape for name, shape in shapes.items()}
    assert checkpoint_kind(plain(wrapped), config) is CheckpointKind(kind)


def test_an_fspad_head_without_its_fusion_is_no_eagle_head() -> None:
    shapes = published.eagle() | published.mlp("layers.0.", 2 * published.HIDDEN)
    assert checkpoint_kind(shapes, {}) is CheckpointKind.FSPAD


@pytest.mark.parametrize(
    ("shapes", "config", "named"),
    [
        ({"encoder.weight": (4, 4)}, {}, "encoder.weight"),
        ({}, {}, "no known kind"),
        (published.eagle(), {"speculators_model_type": "hydra"}, "hydra"),
    ],
)
def test_what_is_none_is_named(shapes: dict[str, Any], config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        checkpoint_kind(shapes, config)
