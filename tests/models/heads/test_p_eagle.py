"""P-EAGLE checkpoints: their layouts, what a mask begins with, and what is missing.

`masked_logits.py` in `tests/support/inputs/` has the formulas, which drafters are tested against.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftline.core.errors import CheckpointError
from draftline.models.heads.load_head import load_head, misfits, read_head_checkpoint
from draftline.models.heads.p_eagle import PEagle, PEagleConfig
from draftline.models.load.model_info import ModelInfo
from support.inputs import head_checkpoints as published

TARGET = ModelInfo(
    path=Path(), model_type="llama", vocab_size=published.VOCAB, hidden_size=published.HIDDEN,
    num_layers=8, num_kv_heads=1, head_dim=8, max_context_len=4096, eos_token_ids=(),
    bos_token_id=None,
)  # fmt: skip


def loaded(folder: Path, shapes: published.Shapes, config: dict[str, Any]) -> PEagle:
    head = load_head(published.save(folder, shapes, config))
    assert isinstance(head, PEagle)
    return head


def test_a_file_of_speculators_is_the_drafters_state_dict(tmp_path: Path) -> None:
    shapes = published.p_eagle_of_speculators()
    head = loaded(tmp_path, shapes, published.SPECULATORS_P_EAGLE)
    stored = {name: one for name, one in published.tensors(shapes).items() if name != "t2d"}
    assert stored.keys() == head.state_dict().keys()
    assert all(torch.equal(head.state_dict()[name], one) for name, one in stored.items())
    config = head.config
    assert isinstance(config, PEagleConfig)
    assert (config.mask_token, config.draft_length) == (published.VOCAB - 1, 4)
    assert (config.num_layers, config.feature_layers) == (2, (0, 2, 4))
    assert config.norm_before_residual
    assert misfits(config, TARGET) == []


@pytest.mark.parametrize("name", ["ptd_token_id", "pard_token", "mask_token_id"])
def test_files_name_the_token_of_masks_in_three_ways(tmp_path: Path, name: str) -> None:
    config = {key: value for key, value in published.P_EAGLE.items() if key != "ptd_token_id"}
    head = loaded(tmp_path, published.p_eagle(), config | {name: 11})
    assert (head.config.mask_token, head.config.draft_length) == (11, 0)
    assert head.config.norm_features == "each"
    assert head.config.layers_of(32) == (1, 15, 28)
    assert not head.config.norm_before_residual
    assert not head.config.has_embedding


def test_masks_pass_the_norms_and_the_projection_of_real_features(tmp_path: Path) -> None:
    head = loaded(tmp_path, published.p_eagle(), published.P_EAGLE)
    masks = head.masks(3)
    assert masks.shape == (3, published.HIDDEN)
    torch.testing.assert_close(masks[2], head.project(head.mask_hidden.view(-1)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mask_hidden": None}, "has no mask_hidden"),
        ({"mask_hidden": (1, 1, 47)}, r"mask_hidden has shape \(1, 1, 47\), and its fc reads 3"),
        ({"mask_hidden": (1, 48)}, r"mask_hidden has shape \(1, 48\) instead of \(1, 1, 48\)"),
        ({"embed_tokens.weight": None}, "has no embed_tokens"),
        ({"layers.1.mlp.up_proj.weight": None}, r"layers\.1\.mlp\.up_proj\.weight is missing"),
        ({"layers.1.hidden_norm.weight": (16,)}, r"layers\.1\.hidden_norm\.weight is unknown"),
        ({"mask_token.weight": (16,), "other": (3,)}, r"mask_token\.weight is unknown; other is"),
        ({"d2t": None}, "has no d2t"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: dict[str, tuple[int, ...] | None], named: str
) -> None:
    shapes = {**published.p_eagle_of_speculators(), **change}
    kept = {name: shape for name, shape in shapes.items() if shape is not None}
    with pytest.raises(CheckpointError, match=named):
        load_head(published.save(tmp_path, kept, published.SPECULATORS_P_EAGLE))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mask_token_id": None}, "names no token for its masks; set mask_token_id"),
        ({"pard_token": 4}, "'mask_token_id': 39, 'pard_token': 4"),
        ({"mask_token_id": published.VOCAB}, "mask token 40 is no unused token"),
        ({"eos_token_id": [3, published.VOCAB - 1]}, "mask token 39 is no unused token"),
    ],
)
def test_a_mask_must_be_a_token_that_no_text_has(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    config = published.SPECULATORS_P_EAGLE | change
    folder = published.save(tmp_path, published.p_eagle_of_speculators(), config)
    with pytest.raises(CheckpointError, match=named):
        read_head_checkpoint(folder)
