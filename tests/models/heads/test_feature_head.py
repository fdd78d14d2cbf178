"""Feature heads compute what their papers say; formulas are written out once more here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.load_head import load_head
from support.inputs import head_checkpoints as published
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

EPS = published.LLAMA["rms_norm_eps"]
ROWS = 7


def causal(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Each row sees itself and those before it."""
    queries, keys, values = (part.transpose(-3, -2) for part in (queries, keys, values))
    attended = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    )
    return attended.transpose(-3, -2)


class KeptKeys:
    """Attention of rows that come one after the other."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if layer in self.kept:
            keys, values = (
                torch.cat([old, new])
                for old, new in zip(self.kept[layer], (keys, values), strict=True)
            )
        self.kept[layer] = keys, values
        parts = (part.transpose(0, 1) for part in (queries, keys, values))
        return functional.scaled_dot_product_attention(*parts, enable_gqa=True).transpose(0, 1)


def head(folder: Path, shapes: published.Shapes, **config: object) -> FeatureHead:
    return load_head(published.save(folder, shapes, published.LLAMA | config))


def inputs(width: int = published.HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    embeddings = torch.randn(ROWS, published.HIDDEN, generator=rng)
    return embeddings, torch.randn(ROWS, width, generator=rng), torch.arange(ROWS)


def rms(states: Tensor, weight: Tensor) -> Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPS) * weight


def attention(states: Tensor, weights: dict[str, Tensor], positions: Tensor) -> Tensor:
    """Causal attention with rotary positions, written out."""
    heads, size = published.HEADS, published.HEAD
    parts = {name: states @ weights[f"layers.0.self_attn.{name}_proj.weight"].T for name in "qkv"}
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))

    def rotated(part: Tensor) -> Tensor:
        first, second = part.chunk(2, -1)
        return part * cos + torch.cat([-second, first], -1) * sin

    queries = rotated(parts["q"].view(-1, heads, size))
    keys = rotated(parts["k"].view(-1, 1, size)).expand(-1, heads, -1)
    values = parts["v"].view(-1, 1, size).expand(-1, heads, -1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / size**0.5
    hidden = torch.ones(len(states), len(states)).triu(1).bool()
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    found = torch.einsum("hqk,khd->qhd", shares, values).flatten(1)
    return found @ weights["layers.0.self_attn.o_proj.weight"].T


def mlp(states: Tensor, weights: dict[str, Tensor]) -> Tensor:
    gate, up, down = (
        weights[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    return (functional.silu(states @ gate.T) * (states @ up.T)) @ down.T


def test_eagle_is_a_llama_layer_without_its_first_norm(tmp_path: Path) -> None:
    eagle = head(tmp_path, published.eagle())
    embeddings, features, positions = inputs()
    config = LlamaConfig(**{**published.LLAMA, "attn_implementation": "eager"})
    layer = LlamaDecoderLayer(config, 0).eval()
    layer.load_state_dict(eagle.layers[0].state_dict(), strict=False)
    layer.input_layernorm = torch.nn.Identity()
    state = eagle.fc(torch.cat([embeddings, features], -1))[None]
    rotation = LlamaRotaryEmbedding(config)(state, positions[None])
    mask = torch.full((1, 1, ROWS, ROWS), -torch.inf).triu(1)
    expected = layer(state, attention_mask=mask, position_embeddings=rotation)
    expected = expected[0] if isinstance(expected, tuple) else expected
    output = eagle(embeddings, features, positions, causal)
    torch.testing.assert_close(output.predict, expected.view(ROWS, -1), atol=1e-5, rtol=1e-5)
    assert output.regress is output.predict


@pytest.mark.parametrize("kind", ["griffin", "fspad"])
def test_two_features_leave_a_split_layer(tmp_path: Path, kind: str) -> None:
    shapes = getattr(published, kind)()
    split = head(tmp_path, shapes)
    weights = split.state_dict()
    embeddings, features, positions = inputs()
    fused = torch.cat([embeddings, features], -1) @ weights["fc.fc.weight"].T
    fused = fused + weights["fc.fc.bias"]
    normed = rms(fused, weights["fc.post_attention_layernorm.weight"])
    if kind == "griffin":
        both = weights["fc.mlp.input_layernorm.weight"]
        pair = torch.cat([rms(normed, both), rms(embeddings, both)], -1)
        inner = functional.silu(pair @ weights["fc.mlp.up_proj.weight"].T)
    else:
        gate = functional.silu(embeddings @ weights["fc.mlp.gate_proj.weight"].T)
        inner = gate * (normed @ weights["fc.mlp.up_proj.weight"].T)
    state = fused + inner @ weights["fc.mlp.down_proj.weight"].T
    state = state + attention(state, weights, positions)
    change = mlp(rms(state, weights["layers.0.post_attention_layernorm.weight"]), weights)
    output = split(embeddings, features, positions, causal)
    first, second = change.chunk(2, -1)
    torch.testing.assert_close(output.predict, state + first, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.regress, state + second, atol=1e-5, rtol=1e-5)
    # Going on from what predicts says something else: only a test sees that in a checkpoint.
    ahead = [
        split(embeddings, part, positions, causal).predict
        for part in (output.predict, output.regress)
    ]
    assert (ahead[0] - ahead[1]).abs().max() > 1e-2


@pytest.mark.parametrize("before_residual", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
def test_eagle3_reads_pairs(tmp_path: Path, *, before_residual: bool, norm_output: bool) -> None:
    options = {"norm_before_residual": before_residual, "norm_output": norm_output}
    eagle3 = head(tmp_path, published.eagle3(), **options)
    weights = eagle3.state_dict()
    embeddings, features, positions = inputs(3 * published.HIDDEN)
    hidden = features @ weights["fc.weight"].T
    torch.testing.assert_close(eagle3.project(features), hidden)
    normed = rms(hidden, weights["layers.0.hidden_norm.weight"])
    pair = torch.cat([rms(embeddings, weights["layers.0.input_layernorm.weight"]), normed], -1)
    state = (normed if before_residual else hidden) + attention(pair, weights, positions)
    state = state + mlp(rms(state, weights["layers.0.post_attention_layernorm.weight"]), weights)
    output = eagle3(embeddings, hidden, positions, causal)
    expected = rms(state, weights["norm.weight"])
    torch.testing.assert_close(output.predict, expected, atol=1e-5, rtol=1e-5)
    going_on = expected if norm_output else state
    torch.testing.assert_close(output.regress, going_on, atol=1e-5, rtol=1e-5)


def test_features_are_normed_before_fc_where_a_checkpoint_has_the_norms(tmp_path: Path) -> None:
    width = published.HIDDEN
    features = inputs(3 * width)[1]
    together = head(tmp_path / "all", published.eagle3() | {"input_norm.weight": (3 * width,)})
    weights = together.state_dict()
    expected = rms(features, weights["input_norm.weight"]) @ weights["fc.weight"].T
    torch.testing.assert_close(together.project(features), expected)
    norms = {f"fc_norm.{index}.weight": (width,) for index in range(3)}
    apart = head(tmp_path / "each", published.eagle3() | norms)
    weights = apart.state_dict()
    parts = [
        rms(part, weights[f"fc_norm.{index}.weight"])
        for index, part in enumerate(features.split(width, -1))
    ]
    torch.testing.assert_close(
        apart.project(features), torch.cat(parts, -1) @ weights["fc.weight"].T
    )


@pytest.mark.parametrize("kind", ["eagle", "griffin", "fspad", "eagle3", "deep_eagle3"])
def test_rows_one_by_one_are_as_rows_together(tmp_path: Path, kind: str) -> None:
    one = head(tmp_path, getattr(published, kind)())
    embeddings, features, positions = inputs(one.config.num_features * published.HIDDEN)
    states = one.project(features)
    together = one(embeddings, states, positions, causal)
    keys = KeptKeys()
    for row in range(ROWS):
        part = slice(row, row + 1)
        output = one(embeddings[part], states[part], positions[part], keys)
        torch.testing.assert_close(output.predict, together.predict[part], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(output.regress, together.regress[part], atol=1e-5, rtol=1e-5)


def test_rows_may_come_in_batches(tmp_path: Path) -> None:
    one = head(tmp_path, published.griffin())
    embeddings, features, positions = inputs()
    expected = one(embeddings, features, positions, causal).regress
    batch = [torch.stack([part, part]) for part in (embeddings, features, positions)]
    output = one(*batch, causal).regress
    torch.testing.assert_close(output, torch.stack([expected, expected]), atol=1e-5, rtol=1e-5)


def test_a_draft_config_of_2048_positions_serves_longer_texts(tmp_path: Path) -> None:
    """Rotary attention sees differences of positions only, however far they are."""
    one = head(tmp_path, published.eagle())
    embeddings, features, positions = inputs()
    near = one(embeddings, features, positions, causal).predict
    far = one(embeddings, features, positions + 100_000, causal).predict
    torch.testing.assert_close(near, far, atol=2e-2, rtol=2e-2)


def test_the_first_layer_of_eagle3_reads_its_hidden_states_as_they_are_projected_once(
    tmp_path: Path,
) -> None:
    """The head's own states go on without `fc`, whose width only the target's features have."""
    one = head(tmp_path, published.eagle3())
    embeddings, features, positions = inputs(3 * published.HIDDEN)
    output = one(embeddings, one.project(features), positions, causal)
    ahead = one(embeddings, output.regress, positions, causal)
    assert ahead.predict.shape == (ROWS, published.HIDDEN)


def test_a_token_map_holds_offsets(tmp_path: Path) -> None:
    one = head(tmp_path, published.eagle3())
    tokens = torch.tensor([0, 1, 9])
    assert one.target_tokens(tokens).tolist() == [0, 4, 36]
    plain = head(tmp_path / "eagle", published.eagle())
    assert plain.target_tokens(tokens) is tokens


def test_layers_are_counted_by_their_outputs(tmp_path: Path) -> None:
    config = head(tmp_path, published.eagle3()).config
    assert config.layers_of(32) == (1, 15, 28)
    assert replace(config, feature_layers=(1, 3)).layers_of(32) == (1, 3)
    assert head(tmp_path / "eagle", published.eagle()).config.layers_of(32) == ()
