"""CPU stages keep quantised weights small, with the logits of their float32 values: bit by bit
where they are widened, with other roundings where products are dot products of bytes."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline.benchmarks.peers import gguf_file
from draftline.benchmarks.peers.gguf_file import write_checkpoint
from draftline.core.errors import CheckpointError
from draftline.models.layers.model_slice import load_slice
from draftline.models.layers.weight_memory import read_weight_memory
from draftline.models.load.bundled import demo_path
from draftline.models.load.gguf_file import unpacked
from draftline.models.load.partition import LayerSpan
from draftline.models.load.quantized_layouts import KEPT_FILE
from draftline.models.load.rounding import rounded
from draftline.models.stage.cpu_path import CpuPath
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import OutputVocabulary, StageOptions
from draftline.models.stage.stage import Stage
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from support.inputs.gguf_blocks import random_blocks, unpacked_pair
from support.inputs.quantized_checkpoints import FORMATS, save_pair
from support.inputs.steps import BLOCK_SIZE
from support.tools.cpu_kernels import FOLDER, load_cpu_kernels
from support.tools.kept_weights import assert_alike, kept, logits
from support.tools.tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig

pytestmark = pytest.mark.compiler

WHOLE = LayerSpan(0, 4, 4)
USED = "cpu_kernels_used"
ALL = "16"  # of a model of 4 layers
FULL = pytest.mark.full
GROUPS_OF_32: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
# How the weights of the layers are kept; a product takes those of the same input together.
KEPT = [
    ("gptq 4", f"uint4:{ALL}"),
    pytest.param("gptq 8", f"int8:{ALL}", marks=FULL),
    ("gptq 2, v2", f"uint4:{ALL}"),
    # Here each weight has an order of its own, and is multiplied alone.
    ("gptq 4, act order", "uint4:28"),
    pytest.param("gptq 4, v2, one group", f"uint4:{ALL}", marks=FULL),
    ("awq", f"uint4:{ALL}"),
    ("fp8 blocks", f"float8_e4m3fn:{ALL}"),
    ("fp8 static", f"float8_e4m3fn:{ALL}"),
    pytest.param("compressed fp8 tensor", f"float8_e4m3fn:{ALL}", marks=FULL),
    pytest.param("compressed fp8 channel", f"float8_e4m3fn:{ALL}", marks=FULL),
    ("compressed int8", f"int8:{ALL}"),
    ("compressed int8 asymmetric", f"int8:{ALL}"),
    pytest.param("packed 4", f"uint4:{ALL}", marks=FULL),
    ("packed 8, one group", f"int8:{ALL}"),
    pytest.param("packed 4, asymmetric", f"uint4:{ALL}", marks=FULL),
    ("packed 4, old zero points", f"uint4:{ALL}"),
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


def stage_of(
    folder: Path, quantization: str = "none", output: OutputVocabulary | None = None
) -> Stage:
    options = StageOptions(
        compile="auto", compile_cache=str(FOLDER), quantization=quantization, output=output
    )
    stage = load_stage(folder, WHOLE, 8, BLOCK_SIZE, options=options)
    assert isinstance(stage.path, CpuPath)
    return stage


@pytest.mark.parametrize(("form", "kinds"), KEPT)
def test_weights_stay_small_and_logits_are_those_of_the_values(
    form: str, kinds: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = save_pair("qwen2", FORMATS[form], tmp_path)
    with caplog.at_level(logging.INFO):
        small, wide = stage_of(pair.quantized), stage_of(pair.plain)
    found = dict(kind.split(":") for kind in kept(caplog, USED)[0].split())
    found["float32"] = str(int(found["float32"]) - 1)  # the head
    expected = dict(kind.split(":") for kind in kinds.split())
    assert found == {"float32": "0"} | expected
    assert kept(caplog, USED)[1] == "float32:17"
    assert_alike(logits(small), logits(wide), kinds)
    assert_alike(logits(small, 20, 1), logits(wide, 20, 1), kinds)


def test_a_quantised_head_stays_small_also_of_another_vocabulary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = save_pair("qwen2", FORMATS["gptq 4"], tmp_path, with_head=True)
    with caplog.at_level(logging.INFO):
        small, wide = stage_of(pair.quantized), stage_of(pair.plain)
    assert kept(caplog, USED)[0] == "uint4:17"
    whole = logits(small)
    assert_alike(whole, logits(wide))
    rows = np.array([7, 3, 11])
    output = OutputVocabulary(rows, np.array([0, 1, 2]), 5)
    pruned = logits(stage_of(pair.quantized, output=output))
    assert torch.equal(pruned[:, :3], whole[:, rows])


@pytest.mark.parametrize(("kind", "kinds"), [("Q4_1", "uint4:17"), ("Q8_0", "int8:17")])
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_of_gguf_files_stay_small_also_a_tied_head(
    *, tied: bool, kind: str, kinds: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "source"
    AutoModelForCausalLM.from_config(
        LlamaConfig(**GROUPS_OF_32, tie_word_embeddings=tied)
    ).float().save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path("demo") / name, source / name)
    write_checkpoint(source, tmp_path / "model.gguf", GGMLQuantizationType[kind])
    folder = unpacked(tmp_path / "model.gguf", tmp_path / "cache")
    plain = shutil.copytree(folder, tmp_path / "plain")
    (plain / KEPT_FILE).unlink()
    with caplog.at_level(logging.INFO):
        small, wide = stage_of(folder), stage_of(plain)
    assert kept(caplog, USED) == [kinds, "float32:17"]
    assert_alike(logits(small), logits(wide))
    rows = np.array([7, 3, 11])
    output = OutputVocabulary(rows, np.array([0, 1, 2]), 5)
    pruned = logits(stage_of(folder, output=output))
    assert_alike(pruned[:, :3], logits(wide)[:, rows])
    for stage, source in ((small, folder), (wide, plain)):
        # More are the group of each input and what fills up last panels, less scales of 16 bits.
        assert 0.8 < stage.memory.weights / read_weight_memory(source).num_bytes() < 1.05
    assert small.memory.weights < 0.7 * wide.memory.weights
    damaged = load_file(folder / KEPT_FILE)
    save_file({n: t for n, t in damaged.items() if not n.endswith("scales")}, folder / KEPT_FILE)
    with pytest.raises(CheckpointError, match="codes or scales are missing; remove the folder"):
        stage_of(folder)


# As llama.cpp mixes them: the kind of most; that of values, of down and of the tied head; and how
# they are kept, queries, keys and values apart.
MIXED = {
    "Q4_K_M": ("Q4_K", "Q6_K", "uint4:16 int8:9"),
    "Q5_K_M": ("Q5_K", "Q6_K", "int8:25"),
    "Q5_0 and Q5_1": ("Q5_0", "Q5_1", "int8:25"),
}


@pytest.mark.parametrize("name", MIXED)
def test_weights_of_one_product_may_be_of_different_kinds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    most, better, kinds = MIXED[name]
    source = tmp_path / "source"
    shape = {"hidden_size": 256, "intermediate_size": 256, "tie_word_embeddings": True}
    AutoModelForCausalLM.from_config(LlamaConfig(**GROUPS_OF_32 | shape)).float().save_pretrained(
        source
    )
    monkeypatch.setattr(gguf_file, "quantize", random_blocks)
    of_names = dict.fromkeys(
        ("v_proj.weight", "down_proj.weight", "embed_tokens.weight"), GGMLQuantizationType[better]
    )
    folder, plain = unpacked_pair(source, most, of_names)
    with caplog.at_level(logging.INFO):
        small, wide = stage_of(folder), stage_of(plain)
    assert kept(caplog, USED) == [kinds, "float32:17"]
    assert_alike(logits(small), logits(wide), kinds)
    assert_alike(logits(small, 20, 1), logits(wide, 20, 1), kinds)
    assert 0.8 < small.memory.weights / read_weight_memory(folder).num_bytes() < 1.05


def test_plain_layers_beside_quantised_ones_and_a_tied_head_are_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
    pair = save_pair("llama", FORMATS["awq"], tmp_path, keep=keep)
    with caplog.at_level(logging.INFO):
        small, wide = stage_of(pair.quantized), stage_of(pair.plain)
    assert sorted(kept(caplog, USED)[0].split()) == ["float32:3", "uint4:16"]
    assert_alike(logits(small), logits(wide))


def test_before_the_kernels_take_them_torch_multiplies_by_the_values(tmp_path: Path) -> None:
    pair = save_pair("qwen2", FORMATS["gptq 4"], tmp_path, with_head=True)
    small = load_slice(pair.quantized, WHOLE, keep=True)
    wide = load_slice(pair.plain, WHOLE)
    x = torch.randn(5, wide.config.hidden_size)
    for found, expected in (
        (small.head, wide.head),
        *(
            (a.self_attn.project, b.self_attn.project)
            for a, b in zip(small.layers, wide.layers, strict=True)
        ),
    ):
        torch.testing.assert_close(found(x), expected(x))


@pytest.mark.parametrize(
    ("kind", "kinds"), [("int8", "int8:16"), ("int4", "uint4:16"), ("fp8", "float8_e4m3fn:16")]
)
@pytest.mark.parametrize("form", [None, "gptq 4, act order"])
def test_rounded_weights_run_by_the_kernels(
    form: str | None, kind: str, kinds: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if form is None:
        source = plain = save_tiny_model("qwen2", tmp_path)
    else:
        pair = save_pair("qwen2", FORMATS[form], tmp_path)
        source, plain = pair.quantized, pair.plain
    with caplog.at_level(logging.INFO):
        small = stage_of(source, kind)
    assert kept(caplog, USED) == [f"{kinds} float32:1"]
    found = logits(small)
    weights = load_file(plain / "model.safetensors")
    for name in weights:
        if name.endswith("_proj.weight"):
            weights[name] = rounded(weights[name], kind).dequantized(torch.float32)
    save_file(weights, plain / "model.safetensors")
    assert_alike(found, logits(stage_of(plain)), kinds)
    assert small.memory.weights < 0.7 * stage_of(plain).memory.weights


def test_weights_that_cannot_be_rounded_are_refused(tmp_path: Path) -> None:
    source = save_tiny_model("qwen2", tmp_path)
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 4] = torch.inf
    save_file(weights, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {name}: a scale is not finite"):
        stage_of(source, "int4")


@pytest.mark.parametrize(
    ("form", "part", "reason"),
    [
        ("gptq 4", "scales", "a scale is not finite"),
        ("fp8 blocks", "weight", "a code is not a num"),
    ],
)
def test_what_is_not_finite_is_refused(form: str, part: str, reason: str, tmp_path: Path) -> None:
    pair = save_pair("llama", FORMATS[form], tmp_path)
    path = pair.quantized / "model.safetensors"
    stored = load_file(path)
    stored[f"model.layers.2.mlp.up_proj.{part}"][0, 0] = torch.nan
    save_file(stored, path)
    with pytest.raises(CheckpointError, match=rf"layers\.2\.mlp\.up_proj .*{reason}"):
        stage_of(pair.quantized)
