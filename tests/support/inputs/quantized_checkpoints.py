"""Checkpoints in every quantised format, written by numpy alone, beside plain ones of their values.

Fields are packed as bits (`np.packbits`), not by shifts and masks as the reader undoes it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.tools.tiny_models import save_tiny_model
from torch import Tensor

Floats = NDArray[np.float32]
# What a module's weight is stored as, by the last part of the names, and the values that it means.
Stored = tuple[dict[str, Tensor], Floats]
GROUP = 16
BLOCK = (32, 32)
OF_AN_EXPERT = re.compile(r"\.experts\.\d+\.\w+$")
AWQ_FIELDS = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True, slots=True)
class Format:
    """`config`: the checkpoint's `quantization_config`; `write`: of a weight [outputs, inputs]."""

    config: dict[str, Any]
    write: Callable[[Floats, np.random.Generator], Stored]


@dataclass(frozen=True, slots=True)
class Groups:
    """Integers from 0 on with zero points and scales [outputs, groups]; inputs' groups."""

    codes: NDArray[np.int64]
    zeros: NDArray[np.int64]
    scales: NDArray[np.float16]
    group_of: NDArray[np.int64]

    @property
    def values(self) -> Floats:
        steps = (self.codes - self.zeros[:, self.group_of]).astype(np.float32)
        return steps * self.scales.astype(np.float32)[:, self.group_of]


def rounded(
    weight: Floats, bits: int, group_of: NDArray[np.int64], *, symmetric: bool, lowest_zero: int = 0
) -> Groups:
    """Each group of an output to steps of its own, from its least to its largest value or 0."""
    num_groups, top = int(group_of.max()) + 1, 2**bits - 1
    low, high = (
        np.stack([edge(weight[:, group_of == group], axis=1) for group in range(num_groups)], 1)
        for edge in (np.min, np.max)
    )
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    if symmetric:
        high = np.maximum(-low, high)
        low = -high
    scales = ((high - low) / top).astype(np.float16)
    steps = -low / scales.astype(np.float32)
    zeros = np.clip(np.rint(steps), lowest_zero, top).astype(np.int64)
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    spread = weight / scales.astype(np.float32)[:, group_of]
    codes = np.clip(np.rint(spread) + zeros[:, group_of], 0, top).astype(np.int64)
    return Groups(codes, zeros, scales, group_of)


def packed(codes: NDArray[np.int64], bits: int) -> NDArray[np.int32]:
    """[rows, n] -> [rows, words], the first field in the lowest bits, zeros behind the last."""
    as_bits = (codes[..., None] >> np.arange(bits)) & 1
    flat = as_bits.reshape(len(codes), -1).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return np.packbits(flat, axis=1, bitorder="little").view("<i4")


def in_order(num_inputs: int, size: int = GROUP) -> NDArray[np.int64]:
    return np.arange(num_inputs) // size


def tensors(**arrays: np.ndarray) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in arrays.items()}


def gptq(
    bits: int, *, v2: bool = False, act_order: bool = False, symmetric: bool = False,
    group: int = GROUP, lowest_zero: int = 0, with_g_idx: bool = True,
) -> Format:  # fmt: skip
    def write(weight: Floats, rng: np.random.Generator) -> Stored:
        inputs = weight.shape[1]
        group_of = in_order(inputs, inputs if group == -1 else group)
        if act_order:
            group_of = rng.permutation(group_of)
        groups = rounded(weight, bits, group_of, symmetric=symmetric, lowest_zero=lowest_zero)
        words = packed(groups.zeros.T, bits)
        if not v2:
            ones = packed(np.ones_like(groups.zeros.T), bits)
            words = (words.view(np.uint32) - ones.view(np.uint32)).view(np.int32)
        stored = tensors(
            qweight=packed(groups.codes, bits).T, qzeros=words, scales=groups.scales.T,
        ) | (tensors(g_idx=group_of.astype(np.int32)) if with_g_idx else {})  # fmt: skip
        return stored, groups.values

    return Format(
        {
            "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order,
            "sym": symmetric, "checkpoint_format": "gptq_v2" if v2 else "gptq",
        },
        write,
    )  # fmt: skip


def awq() -> Format:
    def write(weight: Floats, _rng: np.random.Generator) -> Stored:
        groups = rounded(weight, 4, in_order(weight.shape[1]), symmetric=False)

        def words(fields: NDArray[np.int64]) -> NDArray[np.int32]:
            by_word = fields.reshape(len(fields), -1, 8)[..., AWQ_FIELDS]
            return packed(by_word.reshape(fields.shape), 4)

        stored = tensors(
            qweight=words(groups.codes.T), qzeros=words(groups.zeros.T), scales=groups.scales.T
        )
        return stored, groups.values

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    return Format(config | {"zero_point": True}, write)


def fp8(weight: Floats, scales: Floats) -> tuple[Tensor, Floats]:
    """FP8 of a weight by scales of its shape, and its values."""
    codes = torch.from_numpy(weight / scales).to(torch.float8_e4m3fn)
    return codes, codes.float().numpy() * scales


def blocks(weight: Floats) -> tuple[Floats, Floats]:
    """A scale for each block, [block rows, block columns], and these spread over the weight."""
    rows, columns = (-(-size // side) for size, side in zip(weight.shape, BLOCK, strict=True))
    scales = np.empty((rows, columns), np.float32)
    spread = np.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            place = (
                slice(row * BLOCK[0], (row + 1) * BLOCK[0]),
                slice(column * BLOCK[1], (column + 1) * BLOCK[1]),
            )
            scales[row, column] = np.abs(weight[place]).max() / 448
            spread[place] = scales[row, column]
    return scales, spread


def native_fp8(*, static: bool = False) -> Format:
    def write_blocks(weight: Floats, _rng: np.random.Generator) -> Stored:
        scales, spread = blocks(weight)
        codes, values = fp8(weight, spread)
        return {"weight": codes, "weight_scale_inv": torch.from_numpy(scales)}, values

    def write_static(weight: Floats, _rng: np.random.Generator) -> Stored:
        scale = np.float32(np.abs(weight).max() / 448)
        codes, values = fp8(weight, np.full_like(weight, scale))
        stored = {"weight": codes, "weight_scale": torch.tensor(scale)}
        return stored | {"input_scale": torch.tensor(0.5)}, values

    if static:
        return Format({"quant_method": "fp8", "activation_scheme": "static"}, write_static)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Format(config | {"weight_block_size": list(BLOCK)}, write_blocks)


def compressed(layout: str, bits: int, strategy: str, **weights: Any) -> dict[str, Any]:
    kind = "float" if layout == "float-quantized" else "int"
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": bits, "type": kind, "strategy": strategy, **weights},
    }
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None,
    }  # fmt: skip


def compressed_fp8(strategy: str) -> Format:
    def write(weight: Floats, _rng: np.random.Generator) -> Stored:
        if strategy == "block":
            scales, spread = blocks(weight)
        else:
            axis = 1 if strategy == "channel" else None
            scales = (np.abs(weight).max(axis=axis, keepdims=True) / 448).astype(np.float32)
            spread = np.broadcast_to(scales, weight.shape)
        # The package keeps scales in the model's own format.
        stored = torch.from_numpy(np.ascontiguousarray(scales)).bfloat16()
        spread = spread.copy()
        spread[...] = torch.from_numpy(spread).bfloat16().float().numpy()
        codes, values = fp8(weight, spread)
        shape = (1,) if strategy == "tensor" else stored.shape
        input_scale = {"input_scale": torch.tensor([0.25])} if strategy == "tensor" else {}
        return {"weight": codes, "weight_scale": stored.reshape(shape)} | input_scale, values

    extra = {"block_structure": list(BLOCK)} if strategy == "block" else {}
    return Format(compressed("float-quantized", 8, strategy, **extra), write)


def compressed_int8(*, symmetric: bool) -> Format:
    def write(weight: Floats, _rng: np.random.Generator) -> Stored:
        groups = rounded(weight, 8, in_order(weight.shape[1], weight.shape[1]), symmetric=symmetric)
        stored = tensors(weight=(groups.codes - 128).astype(np.int8), weight_scale=groups.scales)
        if not symmetric:
            stored |= tensors(weight_zero_point=(groups.zeros - 128).astype(np.int8))
        return stored, groups.values

    return Format(compressed("int-quantized", 8, "channel", symmetric=symmetric), write)


def compressed_packed(
    bits: int, *, symmetric: bool = True, act_order: bool = False, group: int = GROUP,
    packed_zeros: bool = True,
) -> Format:  # fmt: skip
    def write(weight: Floats, rng: np.random.Generator) -> Stored:
        group_of = in_order(weight.shape[1], weight.shape[1] if group == -1 else group)
        if act_order:
            group_of = rng.permutation(group_of)
        groups = rounded(weight, bits, group_of, symmetric=symmetric)
        stored = tensors(
            weight_packed=packed(groups.codes, bits),
            weight_scale=groups.scales,
            weight_shape=np.array(weight.shape),
        )
        if not symmetric and packed_zeros:
            stored |= tensors(weight_zero_point=packed(groups.zeros.T, bits).T)
        elif not symmetric:
            half = 1 << (bits - 1)
            stored |= tensors(weight_zero_point=(groups.zeros - half).astype(np.int8))
        if act_order:
            stored |= tensors(weight_g_idx=group_of.astype(np.int32))
        return stored, groups.values

    return Format(
        compressed(
            "pack-quantized", bits, "channel" if group == -1 else "group",
            group_size=None if group == -1 else group, symmetric=symmetric,
        ),
        write,
    )  # fmt: skip


FORMATS: dict[str, Format] = {
    "gptq 4": gptq(4),
    "gptq 4, symmetric, no g_idx": gptq(4, symmetric=True, with_g_idx=False),
    "gptq 8": gptq(8, lowest_zero=1),
    "gptq 2, v2": gptq(2, v2=True),
    "gptq 4, act order": gptq(4, act_order=True, lowest_zero=1),
    "gptq 4, v2, one group": gptq(4, v2=True, group=-1),
    "awq": awq(),
    "fp8 blocks": native_fp8(),
    "fp8 static": native_fp8(static=True),
    "compressed fp8 tensor": compressed_fp8("tensor"),
    "compressed fp8 channel": compressed_fp8("channel"),
    "compressed fp8 block": compressed_fp8("block"),
    "compressed int8": compressed_int8(symmetric=True),
    "compressed int8 asymmetric": compressed_int8(symmetric=False),
    "packed 4": compressed_packed(4),
    "packed 8, one group": compressed_packed(8, group=-1),
    "packed 4, asymmetric": compressed_packed(4, symmetric=False),
    "packed 4, act order": compressed_packed(4, symmetric=False, act_order=True),
    "packed 4, old zero points": compressed_packed(4, symmetric=False, packed_zeros=False),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A quantised checkpoint, and a plain one of the values that its weights mean."""

    quantized: Path
    plain: Path


def save_pair(kind: str, form: Format, folder: Path, **options: Any) -> Pair:
    """Write a tiny model of `kind` both ways; `options` are those of `quantize`."""
    return quantize(save_tiny_model(kind, folder / "source"), form, folder, **options)


def quantize(
    source: Path, form: Format, folder: Path, *, num_shards: int = 1, keep: tuple[str, ...] = (),
    with_head: bool = False, merged: bool = False,
) -> Pair:  # fmt: skip
    """Write a model's checkpoint both ways; modules in `keep` are left unquantised.

    merged  experts, of FP8, are in one tensor a layer, as transformers saves them
    """
    plain, quantized = (
        Path(shutil.copytree(source, folder / name)) for name in ("plain", "quantized")
    )
    weights, stored = load_file(source / "model.safetensors"), dict[str, Tensor]()
    if merged:
        weights = with_merged_experts(weights)
    rng = np.random.default_rng(0)
    for name, weight in weights.items():
        if merged and weight.ndim == 3:
            written = [form.write(one.float().numpy(), rng) for one in weight]
            codes = [parts["weight"].view(torch.uint8) for parts, _ in written]
            stored[name] = torch.stack(codes).view(torch.float8_e4m3fn)
            scales = [
                parts.get("weight_scale_inv", parts.get("weight_scale")) for parts, _ in written
            ]
            stored[f"{name}_scale_inv"] = torch.stack([torch.atleast_2d(one) for one in scales])
            weights[name] = torch.from_numpy(np.stack([values for _, values in written]))
            continue
        module = name.removesuffix(".weight")
        is_linear = module.endswith("_proj") or bool(OF_AN_EXPERT.search(module))
        is_linear |= with_head and module == "lm_head"
        if not is_linear or module in keep:
            stored[name] = weight
            continue
        parts, values = form.write(weight.float().numpy(), rng)
        stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        weights[name] = torch.from_numpy(values)
    save_file(weights, plain / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    edited = config | {"quantization_config": form.config}
    (quantized / "config.json").write_text(json.dumps(edited))
    _save_shards(stored, quantized, num_shards)
    return Pair(quantized, plain)


def with_merged_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With a tensor [experts, outputs, inputs] for each two-part name of experts' matrices."""
    merged = dict(weights)
    gates = sorted(name for name in weights if name.endswith(".experts.0.gate_proj.weight"))
    for owner in (name.removesuffix("0.gate_proj.weight") for name in gates):
        own: dict[str, list[Tensor]] = {}
        for kind in ("gate", "up", "down"):
            names = [name for name in weights if name.startswith(owner) and f".{kind}_" in name]
            own[kind] = [merged.pop(name) for name in sorted(names)]
        both = zip(own["gate"], own["up"], strict=True)
        merged[f"{owner}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in both])
        merged[f"{owner}down_proj"] = torch.stack(own["down"])
    return merged


def _save_shards(stored: dict[str, Tensor], folder: Path, num_shards: int) -> None:
    """In turns, so that the parts of a weight are in several files."""
    if num_shards == 1:
        save_file(stored, folder / "model.safetensors")
        return
    (folder / "model.safetensors").unlink()
    names = sorted(stored)
    files = [f"model-{shard}.safetensors" for shard in range(num_shards)]
    for shard, file in enumerate(files):
        save_file({name: stored[name] for name in names[shard::num_shards]}, folder / file)
    weight_map = {name: files[index % num_shards] for index, name in enumerate(names)}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
