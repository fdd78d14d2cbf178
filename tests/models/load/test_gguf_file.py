"""GGUF files: what they are unpacked to, and which are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline.benchmarks.peers.gguf_file import write_checkpoint
from draftline.core.errors import CheckpointError
from draftline.models.load.bundled import demo_path
from draftline.models.load.checkpoint import TensorFiles, resolve_model_path
from draftline.models.load.gguf_file import LLAMA3_LEN, unpacked
from draftline.models.load.quantized_files import KeptFiles
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    **SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
CONFIGS = [
    LlamaConfig(**SMALL),
    LlamaConfig(**SMALL, tie_word_embeddings=True),
    MistralConfig(**SMALL, head_dim=16, sliding_window=None),
    Qwen2Config(**SMALL),
    Qwen3Config(**SMALL, head_dim=128),
    Qwen2MoeConfig(**EXPERTS, shared_expert_intermediate_size=64),
    Qwen3MoeConfig(**EXPERTS, head_dim=128, norm_topk_prob=True),
    Gemma2Config(**SMALL, head_dim=256),
    Gemma3TextConfig(**SMALL, head_dim=256),
]
TEXT = "def f(x):\n    return x + 2024\n\n# it's tést"


def saved(config: PretrainedConfig, folder: Path) -> Path:
    """A checkpoint of random weights with the bundled tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_path("demo") / name, folder / name)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A GGUF file beside its checkpoint."""
    path = saved(LlamaConfig(**SMALL), tmp_path) / "llama.gguf"
    write_checkpoint(tmp_path, path)
    return path


def rewritten(path: Path, changes: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """The file with other values and further tensors; a value of None leaves one out."""
    reader, other = GGUFReader(path), path.with_name("other.gguf")
    writer = GGUFWriter(other, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in {"general.architecture", *changes}:
            kind, *items = field.types
            writer.add_key_value(key, field.contents(), kind, items[0] if items else None)
    for key, value in changes.items():
        if value is not None:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return other


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_an_unpacked_file_computes_what_its_checkpoint_does(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    checkpoint = saved(config, tmp_path / "checkpoint")
    write_checkpoint(checkpoint, tmp_path / "model.gguf")
    folder = unpacked(tmp_path / "model.gguf", tmp_path / "cache")
    tokens = torch.arange(1, 60)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(checkpoint).eval()(tokens).logits
        found = AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
    # The file has the norms' epsilon as float32.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_text_becomes_the_tokens_of_the_checkpoint(llama: Path, tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(llama.parent)
    found = AutoTokenizer.from_pretrained(unpacked(llama, tmp_path / "cache"))
    assert found.encode(TEXT) == own.encode(TEXT)
    assert found.chat_template == own.chat_template
    assert found.eos_token_id == own.eos_token_id


@pytest.mark.parametrize(
    ("name", "parts"),
    [("smollm", ["2", "0", "2", "4", "5"]), ("llama-bpe", ["202", "45"]), ("gpt-2", ["20245"])],
)
def test_digits_are_split_as_the_file_names_it(
    name: str, parts: list[str], llama: Path, tmp_path: Path
) -> None:
    path = rewritten(llama, {"tokenizer.ggml.pre": name}, {})
    tokenizer = AutoTokenizer.from_pretrained(unpacked(path, tmp_path / "cache"))
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("20245")
    assert [part for part, _ in split] == parts


def test_a_file_is_unpacked_once(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    folder = unpacked(llama, cache)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert unpacked(llama, cache) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in cache.iterdir()] == [folder.name]
    monkeypatch.setattr("draftline.models.load.checkpoint.unpacked", lambda path: path.parent)
    assert resolve_model_path(str(llama)) == llama.parent


def test_quantised_tensors_are_what_they_stand_for(tmp_path: Path) -> None:
    checkpoint = saved(LlamaConfig(**SMALL), tmp_path / "checkpoint")
    write_checkpoint(checkpoint, tmp_path / "small.gguf", GGMLQuantizationType.Q8_0)
    folder = unpacked(tmp_path / "small.gguf", tmp_path / "cache")
    own = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        torch.testing.assert_close(tensor, own[name], atol=1e-3, rtol=1e-2)


def llama3_factors(factor: float) -> np.ndarray:
    """float32 [8]: of head dimension 16, as llama.cpp's converter writes them."""
    found = []
    for frequency in 10000.0 ** -(np.arange(8) / 8):
        wavelength = 2 * np.pi / frequency
        if wavelength < LLAMA3_LEN / 4:
            found.append(1.0)
        elif wavelength > LLAMA3_LEN:
            found.append(factor)
        else:
            smooth = (LLAMA3_LEN / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("config", CONFIGS[:-2], ids=lambda config: config.model_type)
def test_codes_of_all_matrices_are_kept(
    config: PretrainedConfig, kind: str, tmp_path: Path
) -> None:
    """Also of queries and keys, whose rows stand in another order in Llama's files."""
    checkpoint = saved(config, tmp_path / "checkpoint")
    write_checkpoint(checkpoint, tmp_path / "small.gguf", GGMLQuantizationType[kind])
    folder = unpacked(tmp_path / "small.gguf", tmp_path / "cache")
    kept, weights = KeptFiles(TensorFiles(folder)), load_file(folder / "model.safetensors")
    matrices = {name: one for name, one in weights.items() if one.ndim > 1 and "gate.w" not in name}
    assert kept.quantized | kept.experts == matrices.keys()
    assert len(kept.quantized) > 8
    assert len(kept.experts) == (4 if hasattr(config, "num_experts") else 0)
    for name in kept.quantized:
        found = kept.read_quantized(name).dequantized(torch.float32)
        assert torch.equal(found, weights[name]), name
    for name in kept.experts:
        for parts, expected in zip(kept.read_experts(name), weights[name], strict=True):
            found = torch.cat([part.dequantized(torch.float32) for part in parts])
            assert torch.equal(found, expected), name


def test_experts_of_which_a_part_is_of_another_kind_are_not_kept(tmp_path: Path) -> None:
    checkpoint = saved(Qwen3MoeConfig(**EXPERTS, head_dim=128), tmp_path / "checkpoint")
    others = {"experts.up_proj.weight": GGMLQuantizationType.F16}
    write_checkpoint(checkpoint, tmp_path / "some.gguf", GGMLQuantizationType.Q8_0, others)
    kept = KeptFiles(TensorFiles(unpacked(tmp_path / "some.gguf", tmp_path / "cache")))
    assert kept.experts == {f"model.layers.{layer}.mlp.experts.down_proj" for layer in (0, 1)}


def test_a_scale_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint, path = saved(LlamaConfig(**SMALL), tmp_path / "checkpoint"), tmp_path / "small.gguf"
    write_checkpoint(checkpoint, path, GGMLQuantizationType.Q8_0)
    reader = GGUFReader(path, "r+")
    [tensor] = [one for one in reader.tensors if one.name == "blk.1.ffn_up.weight"]
    tensor.data[0, :2] = np.array([np.nan], dtype=np.float16).view(np.uint8)
    reader.data.flush()
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight: a scale is not finite"):
        unpacked(path, tmp_path / "cache")


def test_llama_3s_rotary_factors_become_its_scaling(llama: Path, tmp_path: Path) -> None:
    path = rewritten(llama, {}, {"rope_freqs.weight": llama3_factors(8.0)})
    model = AutoModelForCausalLM.from_pretrained(unpacked(path, tmp_path / "cache"))
    rope = model.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 8.0, 10000.0)
    expected = 10000.0 ** -(np.arange(8) / 8) / llama3_factors(8.0)
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"split.count": 2}, {}, "one of 2 parts"),
        ({"llama.rope.scaling.type": "yarn"}, {}, r"rope.scaling.type is yarn"),
        ({"llama.expert_gating": 3}, {}, r"not known: llama.expert_gating is 3"),
        ({"llama.attention.key_length": 8}, {}, r"key_length is 8, and llama is read with 16"),
        ({"tokenizer.ggml.pre": "tekken"}, {}, r"pre is tekken"),
        ({}, {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, "no place for: blk.0.attn_sinks"),
        ({}, {"rope_freqs.weight": np.ones(8, np.float32) * 3}, "those of no known model"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    changes: dict[str, Any],
    tensors: dict[str, np.ndarray],
    message: str,
    llama: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(CheckpointError, match=message):
        unpacked(rewritten(llama, changes, tensors), tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "rwkv.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"holds a rwkv7 model; .* llama, qwen2"):
        unpacked(tmp_path / "rwkv.gguf", tmp_path / "cache")


@pytest.mark.parametrize("part", [b"", b"GGUF", b"\x00" * 4096])
def test_a_broken_file_is_refused(part: bytes, llama: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(part)
    with pytest.raises(CheckpointError, match=r"broken\.gguf is no GGUF file, or is damaged"):
        unpacked(broken, tmp_path / "cache")
    broken.write_bytes(llama.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"broken\.gguf"):
        unpacked(broken, tmp_path / "cache")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        unpacked(tmp_path / "none.gguf", tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]
