"""Weights of quantised checkpoints are, bit by bit, the values that their parts mean."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline.models.layers.linear_layers import PackedLinear
from draftline.models.layers.model_slice import ModelSlice, load_slice, load_whole_model
from draftline.models.load import checkpoint, quantized_layouts
from draftline.models.load.partition import LayerSpan
from draftline.models.load.quantized_layouts import AwqLayout, GptqLayout, PackedLayout
from draftline.models.stage.load_stage import load_stage
from safetensors.torch import load_file
from support.inputs.quantized_checkpoints import FORMATS, compressed_packed, native_fp8, save_pair
from support.inputs.steps import BLOCK_SIZE, PagedRequest, make_step
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

WHOLE = LayerSpan(0, 4, 4)
HALVES = (LayerSpan(0, 2, 4), LayerSpan(2, 4, 4))


def assert_same_weights(found: ModelSlice, expected: ModelSlice) -> None:
    for layer, same in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.state_dict(), same.state_dict(), rtol=0, atol=0)
        for module, other in zip(layer.modules(), same.modules(), strict=True):
            assert type(module) is type(other)
            if isinstance(module, PackedLinear):
                values = (one.weight.dequantized(torch.float32) for one in (module, other))
                torch.testing.assert_close(*values, rtol=0, atol=0)
    for name in ("embed", "norm"):
        module, same = getattr(found, name), getattr(expected, name)
        assert (module is None) == (same is None)
        if module is not None:
            torch.testing.assert_close(module.state_dict(), same.state_dict(), rtol=0, atol=0)


def logits(folder: Path, spans: Iterable[LayerSpan]) -> Tensor:
    """Of a prompt, through stages that hold these layers."""
    step = make_step([PagedRequest(range(8)).chunk(list(range(2, 22)), 0)])
    *earlier, last = (load_stage(folder, span, 8, BLOCK_SIZE) for span in spans)
    hidden: Tensor | None = None
    for stage in earlier:
        out = stage.run(step, hidden)
        assert isinstance(out, Tensor)
        hidden = out
    return last.logits(step, hidden, np.arange(20, dtype=np.int32))


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen2", marks=pytest.mark.full)])
@pytest.mark.parametrize("form", FORMATS)
def test_weights_and_logits_are_those_of_the_values(form: str, kind: str, tmp_path: Path) -> None:
    pair = save_pair(kind, FORMATS[form], tmp_path)
    for span in (WHOLE, *HALVES):
        parts = [load_slice(folder, span) for folder in (pair.quantized, pair.plain)]
        assert_same_weights(*parts)
    expected = logits(pair.plain, [WHOLE])
    assert torch.equal(logits(pair.quantized, [WHOLE]), expected)
    assert torch.equal(logits(pair.quantized, HALVES), logits(pair.plain, HALVES))
    source = logits(tmp_path / "source", [WHOLE])
    assert (expected - source).square().mean() > 0


@pytest.mark.parametrize("form", ["gptq 4, act order", "awq", "fp8 blocks", "packed 4, asymmetric"])
@pytest.mark.parametrize(("dtype", "own"), [("bfloat16", "none"), ("float16", "int8")])
def test_values_are_rounded_once(form: str, dtype: str, own: str, tmp_path: Path) -> None:
    """To the stage's format, and behind that by its own quantization."""
    pair = save_pair("llama", FORMATS[form], tmp_path)
    parts = [
        load_slice(folder, WHOLE, dtype, "cpu", own) for folder in (pair.quantized, pair.plain)
    ]
    assert_same_weights(*parts)


@pytest.mark.parametrize("form", ["gptq 4, act order", "fp8 blocks", "packed 4, act order"])
def test_large_weights_are_computed_in_pieces(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = save_pair("llama", FORMATS[form], tmp_path)
    monkeypatch.setattr(quantized_layouts, "CHUNK_VALUES", 5 * 32)
    assert_same_weights(*(load_slice(folder, WHOLE) for folder in (pair.quantized, pair.plain)))


@pytest.mark.parametrize("form", ["gptq 8", "awq", "compressed fp8 channel", "packed 4"])
def test_parts_may_lie_in_several_files(form: str, tmp_path: Path) -> None:
    pair = save_pair("qwen3", FORMATS[form], tmp_path, num_shards=3)
    assert len(list(pair.quantized.glob("*.safetensors"))) == 3
    assert_same_weights(*(load_slice(folder, WHOLE) for folder in (pair.quantized, pair.plain)))


@pytest.mark.parametrize("form", ["gptq 4", "awq", "fp8 blocks", "compressed int8", "packed 4"])
def test_modules_that_the_quantiser_left_out_are_plain(form: str, tmp_path: Path) -> None:
    keep = ("model.layers.0.mlp.down_proj", "model.layers.3.self_attn.q_proj")
    pair = save_pair("llama", FORMATS[form], tmp_path, keep=keep)
    assert f"{keep[0]}.weight" in load_file(pair.quantized / "model.safetensors")
    assert_same_weights(*(load_slice(folder, WHOLE) for folder in (pair.quantized, pair.plain)))


def test_one_weight_is_taken_back_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most_alive = []
    read = checkpoint.TensorFiles.read

    def watched(files: checkpoint.TensorFiles, names: Iterable[str]) -> Iterator[Any]:
        for name, tensor in read(files, names):
            alive.append(weakref.ref(tensor))
            most_alive.append(sum(one() is not None for one in alive))
            yield name, tensor

    pair = save_pair("qwen2", FORMATS["gptq 4"], tmp_path)
    monkeypatch.setattr(checkpoint.TensorFiles, "read", watched)
    load_slice(pair.quantized, WHOLE, "bfloat16")
    assert len(most_alive) > 28 * 4
    # The four parts of a weight, and one that the names of the last read still hold.
    assert max(most_alive) <= 5


def test_a_whole_model_is_that_of_transformers(tmp_path: Path) -> None:
    pair = save_pair("qwen2", FORMATS["awq"], tmp_path)
    tokens = torch.arange(2, 22)[None]
    found, expected = (load_whole_model(folder) for folder in (pair.quantized, pair.plain))
    peer = type(expected).from_pretrained(pair.plain, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = peer(input_ids=tokens).logits
        for model in (found, expected):
            assert torch.equal(model(input_ids=tokens).logits, wanted)


def test_fp8_is_what_transformers_makes_of_it() -> None:
    weight = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    parts, values = native_fp8().write(weight, np.random.default_rng(0))
    peer: Any = Fp8Dequantize(None)
    given = {name: [tensor] for name, tensor in parts.items()}
    made = peer.convert(given)["weight"]
    # transformers 5.17 gives a list of one.
    made = made[0] if isinstance(made, list) else made
    assert torch.equal(made.float(), torch.from_numpy(values))


def word(fields: Iterable[int]) -> int:
    """As int32 has it."""
    value = sum(one << (4 * place) for place, one in enumerate(fields))
    return value - (1 << 32) if value >= 1 << 31 else value


def test_awq_keeps_even_outputs_before_odd_ones() -> None:
    one_input = torch.tensor([[0x75316420]], dtype=torch.int32)
    parts = {
        "qweight": one_input,
        "qzeros": torch.zeros_like(one_input),
        "scales": torch.ones(1, 8),
    }
    values = AwqLayout(group_size=-1).weight(parts).dequantized(torch.float32)
    assert values.flatten().tolist() == list(range(8))


@pytest.mark.parametrize("zeros", [[8] * 8, [3, 0, 0, 15, 1, 2, 0, 9], [0] * 8, [1] * 8])
def test_the_first_version_of_gptq_keeps_zero_points_less_one(zeros: list[int]) -> None:
    """A zero point of 0 borrows from its neighbour, and gets it back."""
    less_one = (sum(zero << (4 * place) for place, zero in enumerate(zeros)) - 0x11111111) % 2**32
    less_one -= (less_one >> 31) << 32
    parts = {
        "qweight": torch.tensor([[word(range(8))] * 8], dtype=torch.int32),
        "qzeros": torch.tensor([[less_one]], dtype=torch.int32),
        "scales": torch.full((1, 8), 0.5),
    }
    values = GptqLayout(4, -1, is_v2=False).weight(parts).dequantized(torch.float32)
    expected = [[0.5 * (code - zero) for code in range(8)] for zero in zeros]
    assert values.tolist() == expected
    parts["qzeros"] = torch.tensor([[word(zeros)]], dtype=torch.int32)
    again = GptqLayout(4, -1, is_v2=True).weight(parts).dequantized(torch.float32)
    assert again.tolist() == expected


def test_gptqmodel_may_give_modules_other_bits(tmp_path: Path) -> None:
    eight, four = FORMATS["gptq 8"], FORMATS["gptq 4"]
    inputs = np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)
    layout = GptqLayout(4, 16, is_v2=False, is_mixed=True)
    for form in (four, eight):
        parts, values = form.write(inputs, np.random.default_rng(0))
        found = layout.weight(parts).dequantized(torch.float32)
        assert torch.equal(found, torch.from_numpy(values))


@pytest.mark.parametrize("form", ["packed 4, asymmetric", "packed 8, one group"])
def test_words_behind_the_last_input_are_cut(form: str) -> None:
    inputs = np.random.default_rng(1).normal(size=(11, 48 + 3)).astype(np.float32)
    form_of = {"packed 4, asymmetric": compressed_packed(4, symmetric=False, group=17)}
    parts, values = form_of.get(form, FORMATS[form]).write(inputs, np.random.default_rng(0))
    assert parts["weight_packed"].shape[1] == -(-51 // (8 if "4" in form else 4))
    found = PackedLayout((4, 8)).weight(parts).dequantized(torch.float32)
    assert torch.equal(found, torch.from_numpy(values))
