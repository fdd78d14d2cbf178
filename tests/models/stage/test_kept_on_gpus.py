"""GPU stages keep quantised weights small, and answer as with their values."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.models.attention.backend import choose_backend
from draftline.models.layers import linear_layers
from draftline.models.layers.linear_layers import GpuPackedLinear
from draftline.models.layers.model_slice import load_slice, with_pruned_head
from draftline.models.layers.weight_memory import read_weight_memory
from draftline.models.load.bundled import demo_path
from draftline.models.load.partition import LayerSpan
from draftline.models.load.quantized_layouts import KEPT_FILE
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from draftline.models.stage.plain_path import PlainPath, make_kv
from draftline.models.stage.stage import Stage
from support.inputs.quantized_checkpoints import FORMATS, Pair, gptq, save_pair
from support.inputs.steps import BLOCK_SIZE, PagedRequest, make_step
from transformers import AutoModelForCausalLM, LlamaConfig

WHOLE = LayerSpan(0, 4, 4)
FULL = pytest.mark.full
on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels")
# How the weights of four layers are kept: four products each, and the head; by interpreted kernels,
# or by torch.
KEPT = [
    ("gptq 4", "uint4:16 float32:1", True),
    pytest.param("gptq 8", "uint8:16 float32:1", False, marks=FULL),
    pytest.param("gptq 2, v2", "uint4:16 float32:1", False, marks=FULL),
    # Each weight has an order of its own here, and is multiplied alone.
    ("gptq 4, act order", "uint4:28 float32:1", True),
    pytest.param("packed 4, act order", "uint4:28 float32:1", False, marks=FULL),
    pytest.param("gptq 4, v2, one group", "uint4:16 float32:1", False, marks=FULL),
    ("awq", "uint4:16 float32:1", False),
    ("fp8 blocks", "e4m3:16 float32:1", True),
    ("fp8 static", "e4m3:16 float32:1", False),
    pytest.param("compressed fp8 tensor", "e4m3:16 float32:1", False, marks=FULL),
    pytest.param("compressed fp8 channel", "e4m3:16 float32:1", False, marks=FULL),
    pytest.param("compressed int8", "uint8:16 float32:1", False, marks=FULL),
    ("compressed int8 asymmetric", "uint8:16 float32:1", True),
    ("packed 4", "uint4:16 float32:1", False),
    pytest.param("packed 8, one group", "uint8:16 float32:1", False, marks=FULL),
    pytest.param("packed 4, asymmetric", "uint4:16 float32:1", False, marks=FULL),
    pytest.param("packed 4, old zero points", "uint4:16 float32:1", False, marks=FULL),
]


def fused_stage(folder: Path) -> Stage:
    """What `load_stage` makes on a GPU; its kernels are interpreted."""
    part = load_slice(folder, WHOLE, fused=True)
    kv = make_kv(part, 12, BLOCK_SIZE)
    backend, _ = choose_backend(kv, part.dtype, BLOCK_SIZE, 4, "triton")
    return Stage(PlainPath(part, kv, BLOCK_SIZE, backend))


def plain_stage(folder: Path) -> Stage:
    """Of transformers' modules, by torch."""
    part = load_slice(folder, WHOLE)
    return Stage(PlainPath(part, make_kv(part, 12, BLOCK_SIZE), BLOCK_SIZE))


def gpu_stage(folder: Path, **options: str) -> Stage:
    return load_stage(
        folder, WHOLE, 12, BLOCK_SIZE, "bfloat16", device="cuda", options=StageOptions(**options)
    )


def logits(stage: Stage) -> torch.Tensor:
    step = make_step([PagedRequest(range(6)).chunk(list(range(2, 11)), 0)])
    return stage.logits(step, None, np.arange(9, dtype=np.int32))


def kept(caplog: pytest.LogCaptureFixture) -> list[dict[str, int]]:
    """What the stages loaded so far keep their weights as."""
    said = [
        record.getMessage().partition("weights=")[2].strip("'").split()
        for record in caplog.records
        if "quantized_weights_kept" in record.getMessage()
    ]
    pairs = [[kind.split(":") for kind in kinds] for kinds in said]
    return [{kind: int(count) for kind, count in kinds} for kinds in pairs]


@on_cpus
@pytest.mark.parametrize(("form", "kinds", "by_kernels"), KEPT)
def test_weights_stay_small_and_logits_are_those_of_the_values(
    *, form: str, kinds: str, by_kernels: bool, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(linear_layers, "runs_triton", lambda _: by_kernels)
    pair = save_pair("qwen2", FORMATS[form], tmp_path)
    with caplog.at_level(logging.INFO):
        small, wide = fused_stage(pair.quantized), plain_stage(pair.plain)
    pairs = [kind.split(":") for kind in kinds.split()]
    assert kept(caplog) == [{kind: int(count) for kind, count in pairs}]
    torch.testing.assert_close(logits(small), logits(wide), rtol=0, atol=1e-4)


@on_cpus
@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize(
    ("model", "form", "kinds"),
    [
        ("cohere", "gptq 4", {"uint4": 28}), ("qwen3_moe", "fp8 blocks", {"e4m3": 16}),
        ("deepseek_v3", "fp8 blocks", {"e4m3": 24}),
    ],
)  # fmt: skip
def test_linear_layers_of_other_decoders_stay_small(
    *, model: str, form: str, kinds: dict[str, int], by_kernels: bool, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(linear_layers, "runs_triton", lambda _: by_kernels)
    pair = save_pair(model, FORMATS[form], tmp_path)
    with caplog.at_level(logging.INFO):
        part = load_slice(pair.quantized, WHOLE, fused=True)
    assert kept(caplog) == [kinds]
    small = Stage(PlainPath(part, make_kv(part, 12, BLOCK_SIZE), BLOCK_SIZE))
    torch.testing.assert_close(logits(small), logits(plain_stage(pair.plain)), rtol=0, atol=1e-4)
    memory = [
        read_weight_memory(one, "cuda", "bfloat16").num_bytes()
        for one in (pair.quantized, pair.plain)
    ]
    assert memory[0] < memory[1]


@on_cpus
def test_plain_weights_beside_quantised_ones_are_products_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
    pair = save_pair("llama", FORMATS["awq"], tmp_path, keep=keep)
    with caplog.at_level(logging.INFO):
        small, wide = fused_stage(pair.quantized), plain_stage(pair.plain)
    assert kept(caplog) == [{"float32": 3, "uint4": 15}]
    torch.testing.assert_close(logits(small), logits(wide), rtol=0, atol=1e-4)


@on_cpus
def test_groups_that_no_kernel_takes_are_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = save_pair("llama", gptq(4, group=8), tmp_path)
    with caplog.at_level(logging.INFO):
        small, wide = fused_stage(pair.quantized), plain_stage(pair.plain)
    assert kept(caplog) == [{"float32": 17}]
    torch.testing.assert_close(logits(small), logits(wide), rtol=0, atol=1e-4)


def gguf_pair(kind: str, folder: Path, *, tied: bool) -> Pair:
    # Machines that have no more than `tests/gpu.ini` says run the other tests.
    gguf = pytest.importorskip("gguf")
    from draftline.benchmarks.peers.gguf_file import write_checkpoint
    from draftline.models.load.gguf_file import unpacked

    source = folder / "source"
    config = LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=tied,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).float().save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path("demo") / name, source / name)
    write_checkpoint(source, folder / "model.gguf", gguf.GGMLQuantizationType[kind])
    quantized = unpacked(folder / "model.gguf", folder / "cache")
    plain = shutil.copytree(quantized, folder / "plain")
    (plain / KEPT_FILE).unlink()
    return Pair(quantized, plain)


@on_cpus
@pytest.mark.parametrize(
    ("kind", "codes", "tied"), [("Q4_1", "uint4", True), ("Q8_0", "uint8", False)]
)
def test_matrices_of_gguf_files_stay_small_also_a_pruned_head(
    *, kind: str, codes: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = gguf_pair(kind, tmp_path, tied=tied)
    with caplog.at_level(logging.INFO):
        small, wide = fused_stage(pair.quantized), plain_stage(pair.plain)
    assert kept(caplog)[0] == {codes: 17}
    whole = logits(small)
    torch.testing.assert_close(whole, logits(wide), rtol=0, atol=1e-4)
    head = small.path.part.head
    assert isinstance(head, GpuPackedLinear)
    rows = np.array([7, 3, 4000])
    pruned = with_pruned_head(small.path.part, rows).head
    assert pruned is not None
    x = torch.randn(3, 64)
    torch.testing.assert_close(pruned(x), head(x)[:, rows])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "bytes_of_weights"),
    [
        ("gptq 4", 0.5), ("gptq 4, act order", None), ("awq", 0.5), ("packed 4", 0.5),
        ("packed 4, act order", None), ("fp8 blocks", 1), ("compressed fp8 channel", 1),
        ("compressed fp8 tensor", 1), ("compressed int8", 1), ("compressed int8 asymmetric", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("batch_invariant", ["auto", "on"])
def test_a_stage_on_a_gpu_answers_as_with_the_values(
    form: str, bytes_of_weights: float | None, batch_invariant: str, tmp_path: Path
) -> None:
    pair = save_pair("qwen2", FORMATS[form], tmp_path)
    small, wide = (
        gpu_stage(folder, batch_invariant=batch_invariant)
        for folder in (pair.quantized, pair.plain)
    )
    torch.testing.assert_close(logits(small), logits(wide), rtol=0, atol=2e-2)
    if bytes_of_weights is not None:
        check_bytes(small, bytes_of_weights)


def check_bytes(stage: Stage, of_weight: float) -> None:
    """The codes of a layer's products have so many bytes a weight."""
    for layer in stage.path.part.layers:
        values = [value for module in layer.modules() for value in vars(module).values()]
        products = [value for value in values if isinstance(value, GpuPackedLinear)]
        assert len(products) == 4
        for product in products:
            outputs, inputs = product.weight.shape
            # Of 48 inputs, the last tile of two halves is half padding.
            padded = -(-inputs // 32) * 32
            assert product.weight.codes.is_cuda
            assert product.weight.codes.nbytes <= of_weight * outputs * padded


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["gptq 4", "fp8 blocks", "compressed int8"])
def test_trees_on_a_gpu_answer_as_rows_alone(form: str, tmp_path: Path) -> None:
    """A draft token of a tree has the logits that it has as the only row of a step."""
    stage = gpu_stage(save_pair("qwen2", FORMATS[form], tmp_path).quantized)
    request = PagedRequest(range(6))
    stage.run(make_step([request.chunk([2, 3, 4], 0)]))
    tree = make_step([request.tree([5, 6, 7], [-1, 0, 1], 3)])
    together = stage.logits(tree, None, np.arange(3, dtype=np.int32))
    for place, token in enumerate([5, 6, 7]):
        alone = make_step([request.chunk([token], 3 + place)])
        found = stage.logits(alone, None, np.zeros(1, dtype=np.int32))
        torch.testing.assert_close(found[0], together[place], rtol=0, atol=2e-2)
