"""SpecFormer computes what its paper says; the formula is written out once more here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draftline.core.errors import CheckpointError
from draftline.kernels.dispatch import load_normed_linear
from draftline.models.heads.load_head import load_head
from draftline.models.heads.spec_former import SpecFormer
from support.inputs import head_checkpoints as published
from torch import Tensor
from torch.nn import functional

EPS = published.LLAMA["rms_norm_eps"]
ROWS, DRAFTS, HIDDEN = 5, 4, published.HIDDEN


def causal(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    parts = (part.transpose(-3, -2) for part in (queries, keys, values))
    return functional.scaled_dot_product_attention(
        *parts, is_causal=True, enable_gqa=True
    ).transpose(-3, -2)


def spec_former(folder: Path, **config: object) -> SpecFormer:
    saved = published.save(folder, published.spec_former(), published.LLAMA | config)
    made = load_head(saved)
    assert isinstance(made, SpecFormer)
    return made


def features() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, 4 * HIDDEN, generator=rng), torch.arange(ROWS)


def rms(states: Tensor, weight: Tensor) -> Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPS) * weight


def attention(states: Tensor, weights: dict[str, Tensor], name: str, mask: Tensor) -> Tensor:
    """Two heads on one head of keys, without rotations; `mask` says who is hidden from whom."""
    queries, keys, values = (
        (states @ weights[f"{name}.{part}_proj.weight"].T).unflatten(-1, (-1, published.HEAD))
        for part in "qkv"
    )
    scores = torch.einsum("...qhd,...kd->...hqk", queries, keys[..., 0, :]) / published.HEAD**0.5
    shares = scores.masked_fill(mask, -torch.inf).softmax(-1)
    found = torch.einsum("...hqk,...kd->...qhd", shares, values[..., 0, :])
    return found.flatten(-2) @ weights[f"{name}.o_proj.weight"].T


@pytest.mark.parametrize("is_bidirectional", [True, False])
def test_drafts_see_each_other(tmp_path: Path, *, is_bidirectional: bool) -> None:
    drafter = spec_former(tmp_path, is_bidirectional=is_bidirectional)
    weights = drafter.state_dict()
    states, _ = features()
    # The same position everywhere turns nothing against anything.
    context = drafter.context(drafter.project(states), torch.zeros(ROWS, dtype=torch.int64), causal)
    normed = torch.cat(
        [rms(part, weights[f"norms.{index}.weight"])
         for index, part in enumerate(states.split(HIDDEN, -1))], -1,
    )  # fmt: skip
    known = normed @ weights["down_samp.weight"].T
    later = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
    known = known + attention(
        rms(known, weights["decoder_input_norm.weight"]), weights, "decoder_att", later
    )
    torch.testing.assert_close(context, known, atol=1e-5, rtol=1e-5)

    each = rms(known, weights["positional_input_norm.weight"]) @ weights["positional.weight"].T
    each = (each + weights["positional.bias"]).view(ROWS, DRAFTS, HIDDEN)
    hidden = torch.ones(DRAFTS, DRAFTS, dtype=torch.bool).triu(1)
    hidden &= not is_bidirectional
    each = each + attention(
        rms(each, weights["encoder_input_norm.weight"]), weights, "encoder_att", hidden
    )
    up, gate, down = (weights[f"encoder_ffn.{name}_proj.weight"] for name in ("up", "gate", "down"))
    inner = rms(each, weights["encoder_ffn_input_norm.weight"])
    each = each + (functional.silu(inner @ up.T) * (inner @ gate.T)) @ down.T
    torch.testing.assert_close(drafter.drafts(context), each, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_norms_and_projection_in_one_launch(tmp_path: Path, name: str) -> None:
    states, _ = features()
    plain, drafter = spec_former(tmp_path / "plain"), spec_former(tmp_path / "fast")
    drafter.make_fast()
    # There are no kernels on a CPU.
    assert torch.equal(drafter.down_samp.weight, plain.down_samp.weight)
    expected = plain.project(states)
    drafter.use_normed_linear(load_normed_linear(name))
    torch.testing.assert_close(drafter.project(states), expected, atol=1e-5, rtol=1e-5)
    # Leading dimensions; and the scales are in the weights only once.
    stacked = torch.stack([states, states])
    drafter.use_normed_linear(load_normed_linear(name))
    found = drafter.project(stacked)
    torch.testing.assert_close(found[1], expected, atol=1e-5, rtol=1e-5)


def test_the_context_is_turned_by_positions(tmp_path: Path) -> None:
    drafter = spec_former(tmp_path)
    states, rows = features()
    state = drafter.project(states)
    near = drafter.context(state, rows, causal)
    assert (near - drafter.context(state, 0 * rows, causal)).abs().max() > 1e-3
    torch.testing.assert_close(
        near, drafter.context(state, rows + 50, causal), atol=1e-4, rtol=1e-4
    )


def test_only_the_last_row_needs_drafts(tmp_path: Path) -> None:
    drafter = spec_former(tmp_path)
    states, rows = features()
    context = drafter.context(drafter.project(states), rows, causal)
    torch.testing.assert_close(drafter.drafts(context)[-1:], drafter.drafts(context[-1:]))


def test_the_targets_layers_are_named_by_their_outputs(tmp_path: Path) -> None:
    config = spec_former(tmp_path).config
    assert config.draft_length == DRAFTS
    assert config.layers_of(36) == (-1, 17, 34, 35)
    assert spec_former(tmp_path, feature_layers=[0, 3]).config.layers_of(36) == (0, 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decoder_att.k_proj.weight": None}, "decoder_att.k_proj.weight"),
        ({"positional.weight": (63, 16)}, "63 numbers of drafts"),
        ({"norms.4.weight": (16,)}, r"norms\.4\.weight is unknown"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, change: dict[str, tuple[int, ...] | None], named: str
) -> None:
    shapes = {**published.spec_former(), **change}
    kept = {name: shape for name, shape in shapes.items() if shape is not None}
    folder = published.save(tmp_path, kept, published.LLAMA)
    with pytest.raises(CheckpointError, match=named):
        load_head(folder)
