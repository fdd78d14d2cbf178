"""What transformers makes of odd checkpoints, the engine makes of them: token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tools.greedy_answers import by_engine, by_transformers
from support.tools.tiny_models import FORWARD_KINDS, SIZES, save_tiny_model
from support.tools.tiny_tokenizers import single_bytes
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    PretrainedConfig,
)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tiny(kind: str, folder: Path) -> Path:
    save_tiny_model(kind, folder, num_layers=4)
    single_bytes().save_pretrained(folder)
    return folder


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, changes: Mapping[str, object]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(changes)))


def another_head() -> torch.Tensor:
    return torch.randn(SIZES["vocab_size"], SIZES["hidden_size"]) * 0.25


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_stored_head_is_used_though_the_config_says_that_it_is_tied(
    num_stages: int, tmp_path: Path
) -> None:
    folder = tiny("llama", tmp_path)
    tied = by_engine(folder)
    edit_tensors(folder, **{HEAD: another_head()})
    wanted = by_transformers(folder)
    assert wanted != tied
    assert by_engine(folder, num_stages) == wanted


def test_a_stored_head_is_used_where_weights_are_rounded(tmp_path: Path) -> None:
    """Linear layers in 8 bits change the text, the head is as it is stored."""
    folder = tiny("llama", tmp_path / "tied")
    head = another_head()
    edit_tensors(folder, **{HEAD: head})
    said = by_engine(folder, quantization="int8")
    edit_config(folder, {"tie_word_embeddings": False})
    assert by_engine(folder, quantization="int8") == said


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_head_alone_is_the_embedding_too(num_stages: int, tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    wanted = by_engine(folder)
    embedding = load_file(folder / "model.safetensors")[EMBEDDING]
    edit_tensors(folder, **{HEAD: embedding, EMBEDDING: None})
    assert by_transformers(folder) == wanted
    assert by_engine(folder, num_stages) == wanted


# Of other kinds of models, most of them; some count for some kinds. Small enough to change a text.
STRAY: dict[str, object] = {
    "final_logit_softcapping": 0.5,
    "attn_logit_softcapping": 0.5,
    "query_pre_attn_scalar": 3,
    "sliding_window": 3,
    "attention_multiplier": 3.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 3.0,
    "logits_scaling": 3.0,
    "logit_scale": 3.0,
    "attention_chunk_size": 4,
}


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"]
)
def test_a_setting_counts_where_it_does_in_transformers(kind: str, tmp_path: Path) -> None:
    folder = tiny(kind, tmp_path)
    strays = dict(STRAY)
    if kind == "llama":
        # What Gemma's kinds take for no causal model.
        strays["use_bidirectional_attention"] = True
    edit_config(folder, strays)
    assert by_engine(folder) == by_transformers(folder)


# The others are in the long run.
SHOWN = ("cohere2", "gpt2", "gpt_oss", "granite", "qwen3_moe")
# Windows and chunks exclude one another in Gemma 4; MiniCPM 3 computes its scaling; the self-check
# refuses the other two with windows, of which their attention is not told.
BARRED = {
    "gemma4_text": "attention_chunk_size",
    "minicpm3": "logits_scaling",
    "olmoe": "sliding_window",
    "phimoe": "sliding_window",
}


@pytest.mark.parametrize(
    "kind",
    # Among others scaled, with windows, with experts, with sinks, by learned positions.
    [pytest.param(kind, marks=() if kind in SHOWN else pytest.mark.full) for kind in FORWARD_KINDS],
)
def test_other_decoders_say_what_transformers_says(kind: str, tmp_path: Path) -> None:
    """Greedily over one stage and over two, also with settings of other kinds; with a seed, what
    one stage says."""
    folder = tiny(kind, tmp_path)
    barred = BARRED.get(kind)
    edit_config(folder, {name: value for name, value in STRAY.items() if name != barred})
    assert by_engine(folder, 1) == by_engine(folder, 2) == by_transformers(folder)
    assert by_engine(folder, 1, 0.9) == by_engine(folder, 2, 0.9)


TEXT: dict[str, Any] = {**SIZES, "num_hidden_layers": 2}
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
GEMMA3 = {**TEXT, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}


def composite(kind: str) -> PretrainedConfig:
    if kind == "gemma3":
        text = Gemma3TextConfig(**GEMMA3)
        return Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    if kind == "llava":
        text = LlamaConfig(**TEXT)
        return LlavaConfig(text_config=text, vision_config=CLIPVisionConfig(**VISION))
    text = MistralConfig(**TEXT, sliding_window=7)
    return Mistral3Config(text_config=text, vision_config=PixtralVisionConfig(**VISION))


def save_composite(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(composite(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25)
    model.save_pretrained(folder)
    single_bytes().save_pretrained(folder)
    return folder


OLD, NEW = "language_model.model.", "model.language_model."


@pytest.mark.parametrize(
    ("kind", "names", "num_stages"),
    [("gemma3", OLD, 1), ("gemma3", NEW, 2), ("llava", OLD, 2), ("mistral3", NEW, 1)],
)
def test_the_text_part_of_a_composite_model_is_served(
    kind: str, names: str, num_stages: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By its tensors' names of old exports and of new ones."""
    folder = save_composite(kind, tmp_path)
    wanted = by_transformers(folder, AutoModelForImageTextToText)
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith(OLD) for name in tensors)
    if names == NEW:
        renamed = {
            name.replace(OLD, NEW).replace("language_model.lm_head", "lm_head"): tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        assert by_transformers(folder, AutoModelForImageTextToText) == wanted
    assert by_engine(folder, num_stages) == wanted
    [said] = [line for line in caplog.messages if "event=text_part_served" in line]
    assert f"model_type={kind} " in said


def test_a_single_file_comes_before_an_index(tmp_path: Path) -> None:
    folder = tiny("qwen2", tmp_path)
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    other = save_tiny_model("qwen2", tmp_path / "other", num_layers=4, seed=1)
    (other / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    wanted = by_transformers(folder)
    assert by_engine(folder) == wanted
