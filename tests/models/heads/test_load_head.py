"""Checkpoints with the published names are loaded whole; what does not belong is listed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draftline.core.errors import CheckpointError
from draftline.models.heads.load_head import load_head, misfits, read_head_checkpoint
from draftline.models.load.model_info import ModelInfo
from support.inputs import head_checkpoints as published

TARGET = ModelInfo(
    path=Path(), model_type="llama", vocab_size=published.VOCAB, hidden_size=published.HIDDEN,
    num_layers=8, num_kv_heads=1, head_dim=8, max_context_len=4096, eos_token_ids=(),
    bos_token_id=None,
)  # fmt: skip
NESTED = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": published.LLAMA,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "draft_vocab_size": published.DRAFT_VOCAB,
}
KINDS = [
    "eagle", "fspad", "griffin", "eagle3", "deep_eagle3", "spec_former", "dflash",
    "dflash_of_speculators",
]  # fmt: skip
CONFIGS = {
    "deep_eagle3": published.DEEP,
    "dflash": published.DFLASH,
    "dflash_of_speculators": published.SPECULATORS_DFLASH,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_the_heads_state_dict(tmp_path: Path, kind: str) -> None:
    shapes = getattr(published, kind)()
    config = CONFIGS.get(kind, published.LLAMA)
    head = load_head(published.save(tmp_path, shapes, config))
    held = {name for name in shapes if name != "t2d"}
    assert {name.replace("midlayer.", "layers.0.") for name in held} == head.state_dict().keys()
    for name, tensor in published.tensors(shapes).items():
        if name in held:
            loaded = head.state_dict()[name.replace("midlayer.", "layers.0.")]
            assert torch.equal(loaded, tensor), name
    assert misfits(head.config, TARGET) == []
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_weights_take_the_dtype_and_maps_keep_theirs(tmp_path: Path) -> None:
    folder = published.save(tmp_path, published.eagle3(), published.LLAMA)
    head = load_head(folder, torch.bfloat16)
    assert head.fc.weight.dtype == torch.bfloat16
    assert head.d2t.dtype == torch.int64


def test_a_file_of_speculators_names_layers_by_their_inputs(tmp_path: Path) -> None:
    folder = published.save(tmp_path, published.eagle3("layers.0."), NESTED)
    config = load_head(folder).config
    assert config.feature_layers == (1, 3, 4)
    assert config.norm_before_residual, "what these files mean where they do not say"
    assert config.num_heads == published.HEADS


def test_shapes_come_from_the_tensors_not_from_the_config(tmp_path: Path) -> None:
    """Drafts' configs repeat their targets': other heads, other widths."""
    wrong = published.LLAMA | {"num_key_value_heads": 8, "intermediate_size": 999, "hidden_size": 8}
    config = load_head(published.save(tmp_path, published.griffin(), wrong)).config
    assert (config.num_kv_heads, config.intermediate_size) == (1, published.INNER)
    assert (config.fusion_size, config.hidden_size) == (published.FUSED, published.HIDDEN)


@pytest.mark.parametrize("bias", [True, False])
def test_biases_are_optional(tmp_path: Path, *, bias: bool) -> None:
    shapes = published.eagle()
    del shapes["fc.bias"]
    if bias:
        shapes |= {
            f"layers.0.self_attn.{name}_proj.bias": (size,)
            for name, size in (("q", 16), ("k", 8), ("v", 8))
        }
    config = load_head(published.save(tmp_path, shapes, published.LLAMA)).config
    assert not config.has_fusion_bias
    assert config.has_attention_bias is bias


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers.0.extra.weight": (4,)}, r"layers\.0\.extra\.weight is unknown"),
        ({"fc.mlp.input_layernorm.weight": (5,)}, r"shape \(5,\) instead of \(16,\)"),
        ({"layers.0.mlp.up_proj.weight": None}, r"up_proj\.weight is missing"),
        ({"layers.0.self_attn.o_proj.weight": None}, r"no matrix layers\.0\.self_attn\.o_proj"),
    ],
)
def test_tensors_that_do_not_belong_are_listed(
    tmp_path: Path, change: dict[str, tuple[int, ...] | None], named: str
) -> None:
    shapes = {**published.griffin(), **change}
    kept = {name: shape for name, shape in shapes.items() if shape is not None}
    folder = published.save(tmp_path, kept, published.LLAMA)
    with pytest.raises(CheckpointError, match=named):
        load_head(folder)


def test_a_kind_without_a_network_is_refused_by_name(tmp_path: Path) -> None:
    shapes = published.dflash() | {"prefix_gru.weight_ih_l0": (3, 4)}
    folder = published.save(tmp_path, shapes, published.DFLASH)
    assert read_head_checkpoint(folder).config is None
    with pytest.raises(CheckpointError, match="domino"):
        load_head(folder)


@pytest.mark.parametrize(
    ("d2t", "named"),
    [
        (torch.arange(10) * 4, "offsets"),
        (-torch.arange(10), "offsets"),
        (None, "no d2t"),
    ],
)
def test_a_wrong_token_map_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, d2t: torch.Tensor | None, named: str
) -> None:
    """Ids instead of offsets, two draft tokens for one, or no map for a smaller vocabulary."""
    shapes = published.eagle3("layers.0.")
    made = published.tensors(shapes)
    if d2t is None:
        del made["d2t"], made["t2d"]
    else:
        made["d2t"] = d2t
    monkeypatch.setattr(published, "tensors", lambda _shapes: made)
    folder = published.save(tmp_path, shapes, published.LLAMA)
    with pytest.raises(CheckpointError, match=named):
        load_head(folder)


def test_what_does_not_fit_a_target_is_said(tmp_path: Path) -> None:
    config = load_head(published.save(tmp_path, published.eagle(), published.LLAMA)).config
    other = ModelInfo(**{
        **{name: getattr(TARGET, name) for name in ModelInfo.__slots__},
        "hidden_size": 32, "vocab_size": 99,
    })  # fmt: skip
    reasons = misfits(config, other)
    assert any("features of 16" in reason for reason in reasons)
    assert any("40 tokens" in reason for reason in reasons)
    assert any("16 wide" in reason for reason in reasons)
    eagle3 = load_head(published.save(tmp_path / "e3", published.eagle3("layers.0."), NESTED))
    shallow = ModelInfo(**{
        **{name: getattr(TARGET, name) for name in ModelInfo.__slots__}, "num_layers": 3,
    })  # fmt: skip
    assert any("layers (1, 3, 4)" in reason for reason in misfits(eagle3.config, shallow))
    deep = load_head(published.save(tmp_path / "d", published.deep_eagle3(), published.LLAMA))
    assert misfits(deep.config, TARGET) == [
        "it reads 5 states of a token, and its config.json names layers (1, 3, 4)"
    ]


@pytest.mark.parametrize("files", [(), ("config.json",)])
def test_a_folder_that_is_no_checkpoint_says_what_is_missing(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json|none of"):
        read_head_checkpoint(tmp_path)
