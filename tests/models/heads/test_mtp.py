"""A checkpoint's own layer for multi-token prediction computes what transformers computes of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from draftline.core.errors import CheckpointError, ConfigError
from draftline.models.heads.mtp import load_mtp_head, read_mtp
from draftline.models.layers.model_slice import load_slice
from draftline.models.load.bundled import demo_path
from draftline.models.load.model_info import read_model_info
from draftline.models.load.partition import LayerSpan
from safetensors.torch import load_file, save_file
from support.inputs.mtp_checkpoint import HIDDEN, KINDS, NUM_LAYERS, VOCAB, write_mtp_checkpoint
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

ROWS = 11


def causal(_layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    queries, keys, values = (part.transpose(0, 1)[None] for part in (queries, keys, values))
    return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)[
        0
    ].transpose(0, 1)


def peer_of(folder: Path, kind: str) -> tuple[Any, MtpModel]:
    """transformers' own target and layer."""
    target: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    if kind == "qwen3_next":
        target.config.num_mtp_layers = 1
        target.config.mtp_layer_types = ["full_attention"]
    if kind == "glm4_moe_lite":
        target.config.num_mtp_layers = 1
        target.config.mtp_mlp_layer_types = ["sparse"]
    # It knows the numbers of published checkpoints alone.
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{NUM_LAYERS}\.", r"^mtp\."]
    return target, MtpModel.from_pretrained(target)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_it_says_what_transformers_layer_says(tmp_path: Path, kind: str) -> None:
    folder = write_mtp_checkpoint(tmp_path / kind, kind)
    head = load_mtp_head(read_model_info(folder), torch.float32, "cpu")
    target, peer = peer_of(folder, kind)
    tokens = torch.randint(0, VOCAB, (1, ROWS + 1))
    features = torch.randn(1, ROWS, HIDDEN)
    places = torch.arange(ROWS)
    expected = peer.forward_layer(
        0, features, places[None], MtpCache(config=target.config.get_mtp_config()),
        input_ids=tokens[:, 1:],
    )[0]  # fmt: skip
    embeddings = target.get_input_embeddings()(tokens[0, 1:])
    drafted = head(embeddings, features[0], places, causal)
    torch.testing.assert_close(drafted.predict, expected)
    assert drafted.regress is drafted.predict


@pytest.mark.parametrize("kind", KINDS)
def test_of_several_layers_the_first_drafts(tmp_path: Path, kind: str) -> None:
    folder = write_mtp_checkpoint(tmp_path / "one", kind)
    target = read_model_info(write_mtp_checkpoint(tmp_path / "two", kind, num_mtp_layers=2))
    stored = read_mtp(target, torch.float32, "cpu")
    head = load_mtp_head(target, torch.float32, "cpu")
    assert stored.num_layers == 2
    # Embedding and output head are the target's.
    of_layer = re.compile(rf"(mtp|layers\.{NUM_LAYERS})\.(?!embed_tokens|shared_head\.head)")
    tensors = load_file(folder / "model.safetensors")
    count = sum(tensor.numel() for name, tensor in tensors.items() if of_layer.search(name))
    assert stored.num_parameters == count
    one = load_mtp_head(read_model_info(folder), torch.float32, "cpu")
    for own, other in zip(head.parameters(), one.parameters(), strict=True):
        assert torch.equal(own, other)
    # Nor do the others disturb the target.
    assert len(load_slice(target.path, LayerSpan(0, NUM_LAYERS, NUM_LAYERS)).layers) == NUM_LAYERS


def test_the_target_loads_without_the_layer(tmp_path: Path) -> None:
    folder = write_mtp_checkpoint(tmp_path / "glm", "glm4_moe")
    part = load_slice(folder, LayerSpan(0, NUM_LAYERS, NUM_LAYERS))
    assert len(part.layers) == NUM_LAYERS


def test_layers_that_the_config_does_not_tell_of_are_an_error(tmp_path: Path) -> None:
    folder = write_mtp_checkpoint(tmp_path / "glm", "glm4_moe")
    config = folder / "config.json"
    config.write_text(
        config.read_text().replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0')
    )
    with pytest.raises(CheckpointError, match=r"model\.layers\.3"):
        load_slice(folder, LayerSpan(0, NUM_LAYERS, NUM_LAYERS))


def test_a_target_without_the_layer_is_named() -> None:
    with pytest.raises(ConfigError, match="mtp needs a model with MTP layers"):
        load_mtp_head(read_model_info(demo_path("demo")), torch.float32, "cpu")


def test_what_the_layer_lacks_is_named(tmp_path: Path) -> None:
    folder = write_mtp_checkpoint(tmp_path / "glm", "glm4_moe")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.{NUM_LAYERS}.eh_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="eh_proj"):
        load_mtp_head(read_model_info(folder), torch.float32, "cpu")
