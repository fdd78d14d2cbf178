"""DFlash computes what its authors' code does; the formula is written out once more here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draftline.core.errors import CheckpointError
from draftline.models.heads.dflash import DFlash
from draftline.models.heads.dflash_config import DFlashConfig, published_fields
from draftline.models.heads.load_head import load_head
from support.inputs import head_checkpoints as published
from torch import Tensor
from torch.nn import functional

EPS = published.LLAMA["rms_norm_eps"]
ROWS, BLOCK, HIDDEN, HEAD = 6, 4, published.HIDDEN, published.HEAD


def dflash(folder: Path, config: dict[str, Any], **changes: Any) -> DFlash:
    made = load_head(published.save(folder, published.dflash(), {**config, **changes}))
    assert isinstance(made, DFlash)
    return made


def own(**fields: Any) -> dict[str, Any]:
    """A config whose `dflash_config` has further fields."""
    options = {**published.DFLASH["dflash_config"], **fields}
    return {**published.DFLASH, "dflash_config": options}


def rms(states: Tensor, weight: Tensor) -> Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPS) * weight


def turned(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotated by positions, halves paired."""
    rates = 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    angles = positions[:, None] * rates
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def written_out(
    weights: dict[str, Tensor], features: Tensor, embeddings: Tensor, hidden: list[Tensor]
) -> Tensor:
    """States of a block behind a text; `hidden`: by layer, who is hidden from each row."""
    context = rms(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    states = embeddings
    start, places = len(features), torch.arange(len(features) + len(embeddings))
    for index, mask in enumerate(hidden):
        own_weights = {
            name.removeprefix(f"layers.{index}."): weight for name, weight in weights.items()
        }
        attention = {
            name: own_weights[f"self_attn.{name}_proj.weight"] for name in ("q", "k", "v", "o")
        }
        rows = rms(states, own_weights["input_layernorm.weight"])
        # The text's rows enter as they are, the block's normed.
        seen = torch.cat([context, rows])
        queries = rms((rows @ attention["q"].T).unflatten(-1, (-1, HEAD)),
                      own_weights["self_attn.q_norm.weight"])  # fmt: skip
        keys = rms((seen @ attention["k"].T).unflatten(-1, (-1, HEAD)),
                   own_weights["self_attn.k_norm.weight"])  # fmt: skip
        queries, keys = turned(queries, places[start:]), turned(keys, places)
        scores = torch.einsum("qhd,kd->hqk", queries, keys[:, 0]) / HEAD**0.5
        shares = scores.masked_fill(mask, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,kd->qhd", shares, seen @ attention["v"].T).flatten(-2)
        states = states + attended @ attention["o"].T
        inner = rms(states, own_weights["post_attention_layernorm.weight"])
        gate, up = (inner @ own_weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        states = states + (functional.silu(gate) * up) @ own_weights["mlp.down_proj.weight"].T
    return rms(states, weights["norm.weight"])


def computed(head: DFlash, features: Tensor, embeddings: Tensor) -> Tensor:
    kept = list(head.context_keys(head.context(features), torch.arange(ROWS)))
    places = torch.arange(ROWS + BLOCK)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        seen = [torch.cat(pair) for pair in zip(kept[layer], (keys, values), strict=True)]
        found = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], *(part.transpose(0, 1)[None] for part in seen),
            attn_mask=head.config.view(layer).sees(places[ROWS:, None] - places), enable_gqa=True,
        )  # fmt: skip
        return found[0].transpose(0, 1)

    return head(embeddings, ROWS + torch.arange(BLOCK), attend)


ALL = torch.zeros(BLOCK, ROWS + BLOCK, dtype=torch.bool)
LATER = torch.ones_like(ALL).triu(ROWS + 1)
# Rows 0 to 3 stand at 6 to 9 and see five places, themselves counted.
NEAR = torch.ones_like(ALL).tril(ROWS - 5)
BEHIND = torch.ones_like(ALL).triu(ROWS + 5)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


@pytest.mark.parametrize(
    ("config", "hidden"),
    [
        (published.DFLASH, [ALL, ALL]),
        (own(causal=True), [LATER, LATER]),
        (own(causal_head=True), [LATER, LATER]),
        (published.DFLASH | SLIDING, [LATER | NEAR, ALL]),
        (published.DFLASH | SLIDING | {"is_causal": False}, [NEAR | BEHIND, ALL]),
        (published.DFLASH | SLIDING | {"is_causal": True}, [LATER | NEAR, LATER]),
        (own(use_swa=True, swa_window_size=5), [NEAR | BEHIND] * 2),
    ],
)
def test_a_block_sees_the_text_and_itself(
    tmp_path: Path, config: dict[str, Any], hidden: list[Tensor]
) -> None:
    head = dflash(tmp_path, config)
    rng = torch.Generator().manual_seed(5)
    features = torch.randn(ROWS, 2 * HIDDEN, generator=rng)
    embeddings = torch.randn(BLOCK, HIDDEN, generator=rng)
    expected = written_out(head.state_dict(), features, embeddings, hidden)
    torch.testing.assert_close(computed(head, features, embeddings), expected, atol=1e-5, rtol=1e-5)


def test_where_it_stands_is_told_by_distance_alone(tmp_path: Path) -> None:
    head = dflash(tmp_path, published.DFLASH)
    context = head.context(torch.randn(ROWS, 2 * HIDDEN))
    here, there = (
        list(head.context_keys(context, torch.arange(ROWS) + shift)) for shift in (0, 40)
    )
    for (keys, values), (turned_keys, turned_values) in zip(here, there, strict=True):
        assert (keys - turned_keys).abs().max() > 1e-2
        assert torch.equal(values, turned_values)


def test_layouts_name_their_rows(tmp_path: Path) -> None:
    filled = dflash(tmp_path / "filled", published.DFLASH)
    assert (filled.config.draft_length, filled.config.first_row) == (3, 1)
    assert filled.block(torch.tensor([[5], [6]])).tolist() == [[[5, 39, 39, 39]], [[6, 39, 39, 39]]]
    rows = torch.arange(4.0)[:, None]
    assert filled.drafts(rows).flatten().tolist() == [1, 2, 3]
    shifted = dflash(tmp_path / "shifted", own(sample_from_anchor=True))
    assert shifted.config.draft_length == 4
    assert shifted.drafts(rows).flatten().tolist() == [0, 1, 2, 3]


def test_logits_are_scaled_before_they_are_bounded(tmp_path: Path) -> None:
    plain = dflash(tmp_path / "plain", published.DFLASH)
    raw = torch.tensor([[-8.0, 0.0, 2.0]])
    assert torch.equal(plain.logits(raw), raw)
    bounded = dflash(tmp_path / "mixed", published.MIXED_DFLASH, block_size=4)
    torch.testing.assert_close(bounded.logits(raw), torch.tanh(raw * 0.5 / 2.0) * 2.0)


def test_layers_of_the_target(tmp_path: Path) -> None:
    config = dflash(tmp_path, published.DFLASH).config
    assert config.layers_of(36) == (1, 3)
    unnamed = DFlashConfig(16, 24, 2, 1, 8, 16, 39, num_features=5)
    assert unnamed.layers_of(36) == (1, 9, 17, 25, 33)
    assert DFlashConfig(16, 24, 2, 1, 8, 16, 39).layers_of(36) == (18,)


def test_a_file_of_speculators_names_layers_by_their_inputs(tmp_path: Path) -> None:
    folder = published.save(
        tmp_path, published.dflash_of_speculators(), published.SPECULATORS_DFLASH
    )
    config = load_head(folder).config
    assert isinstance(config, DFlashConfig)
    assert config.feature_layers == (1, 3)
    assert (config.block_size, config.draft_length) == (4, 3)
    assert (config.has_embedding, config.draft_vocab_size) == (True, published.DRAFT_VOCAB)


@pytest.mark.parametrize(
    "config",
    [published.DFLASH, published.DFLASH | SLIDING, published.MIXED_DFLASH, own(causal=True)],
)
def test_what_is_written_is_read_again(tmp_path: Path, config: dict[str, Any]) -> None:
    read = dflash(tmp_path / "first", config).config
    plain = {name: value for name, value in published.DFLASH.items() if name != "dflash_config"}
    written = {**plain, **published_fields(read)}
    assert dflash(tmp_path / "again", written).config == read


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (published.LLAMA, "mask_token_id None"),
        (published.DFLASH | {"block_size": 8}, "block_size 8 and, in dflash_config, 4"),
        (own(mask_token_id=published.VOCAB), "no unused token"),
        (published.DFLASH | {"eos_token_id": published.VOCAB - 1}, "no unused token"),
        (own(target_layer_ids=[1, 2, 3]), "not 3 features of 16"),
        (own(attention_sink_bias=True, draft_shift=2), "attention_sink_bias, draft_shift"),
        (own(block_size=1), "a block of 1"),
        (published.DFLASH | {"layer_types": ["full_attention"]}, "of 2 layers"),
        (published.DFLASH | {"layer_types": ["sliding_attention"] * 2}, "sliding_window 0"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        dflash(tmp_path, config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers.0.self_attn.g_proj.weight": (16, 16)}, r"g_proj\.weight is unknown"),
        ({"layers.1.self_attn.k_norm.weight": None}, r"layers\.1\.self_attn\.k_norm.* is missing"),
        ({"layers.0.self_attn.q_norm.weight": None}, "query norm of shape None"),
        ({"layers.0.mlp.down_proj.weight": None}, "no matrix layers.0.mlp.down_proj"),
        ({"encoder.fc.weight": (16, 32), "fc.weight": None}, "no matrix fc.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: dict[str, tuple[int, ...] | None], named: str
) -> None:
    shapes = {**published.dflash(), **change}
    kept = {name: shape for name, shape in shapes.items() if shape is not None}
    with pytest.raises(CheckpointError, match=named):
        load_head(published.save(tmp_path, kept, published.DFLASH))


def test_biases_are_optional(tmp_path: Path) -> None:
    sizes = {"q": 16, "k": 8, "v": 8, "o": HIDDEN}
    shapes = published.dflash() | {
        f"layers.{index}.self_attn.{name}_proj.bias": (size,)
        for index in range(2)
        for name, size in sizes.items()
    }
    head = load_head(published.save(tmp_path, shapes, published.DFLASH))
    assert shapes.keys() == head.state_dict().keys()
