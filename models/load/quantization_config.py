"""Reads `quantization_config` of a checkpoint's config.json, and selects its layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ...core.errors import CheckpointError
from .quantized_layouts import (
    AWQ_BITS,
    GPTQ_BITS,
    PACKED_BITS,
    AwqLayout,
    ExpertsLayout,
    Fp8ExpertsLayout,
    GptqLayout,
    Layout,
    Mxfp4ExpertsLayout,
    PackedLayout,
    ScaledLayout,
)

# Tensors for quantised activations and KV caches, which draftline does not quantise.
ACTIVATIONS = frozenset(
    f"{what}_{kind}"
    for what in ("input", "output", "q", "k", "v")
    for kind in ("scale", "zero_point")
) | {"activation_scale"}
INSTEAD = (
    "give the unquantised model, or one in compressed-tensors (FP8, int8, packed int4 or int8), "
    "fp8, awq (gemm), gptq or mxfp4"
)
SCALED_FORMATS = frozenset({"float-quantized", "int-quantized", "naive-quantized"})
PACKED_FORMAT = "pack-quantized"
# ModelOpt's own file, which older exports have in place of `quantization_config`.
MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class Quantization:
    """The layout of a checkpoint's quantised weights.

    description  for display: method, bits and groups
    layouts      that modules may have
    experts      that the matrices of all experts of a layer may have
    ignored      last parts of the names of tensors unrelated to weights
    extra_biases whether modules that have no bias may bring one of zeros
    """

    description: str
    layouts: tuple[Layout, ...]
    experts: tuple[ExpertsLayout, ...] = ()
    ignored: frozenset[str] = frozenset()
    extra_biases: bool = False


def read_quantization(folder: Path, config: PretrainedConfig) -> Quantization | None:
    """How the weights of a model folder are quantised; None: they are not.

    Raises `CheckpointError` naming the unsupported format, and the supported ones.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        stored = getattr(config, "compression_config", None)
    if stored is None and (folder / MODELOPT_FILE).is_file():
        stored = {"quant_method": "modelopt"}
    if not stored:
        return None
    fields = stored if isinstance(stored, dict) else stored.to_dict()
    method = str(fields.get("quant_method", "")).lower()
    if method not in METHODS:
        named = f"quant_method {method!r}" if method else "a quantization_config without a method"
        raise CheckpointError(f"{folder}: weights of {named} are not read; {INSTEAD}")
    try:
        return METHODS[method](fields)
    except ValueError as error:
        raise CheckpointError(f"{folder}: weights of {method} {error}; {INSTEAD}") from error


def _gptq(fields: Mapping[str, Any]) -> Quantization:
    # `format` is transformers' name of it; older files have neither.
    version = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    if fields.get("is_marlin_format"):
        version = "marlin"
    version = str(version).lower()
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"in the format {version!r} are not read")
    if fields.get("pack_dtype", "int32") != "int32":
        raise ValueError(f"packed in {fields['pack_dtype']} are not read")
    bits, size = _number(fields, "bits"), _group_size(fields, "group_size")
    if bits not in GPTQ_BITS:
        raise ValueError(f"of {bits} bits are not read")
    order = ", act order" if fields.get("desc_act") else ""
    return Quantization(
        f"GPTQ, {bits} bits, {_groups(size)}{order}",
        (GptqLayout(bits, size, version == "gptq_v2", is_mixed=bool(fields.get("dynamic"))),),
        extra_biases=True,
    )


def _awq(fields: Mapping[str, Any]) -> Quantization:
    version = fields.get("version") or fields.get("checkpoint_format") or fields.get("format")
    if str(version or "gemm").lower() != "gemm":
        raise ValueError(f"of version {version!r} are not read")
    bits = _number(fields, "bits", "w_bit")
    size = _group_size(fields, "group_size", "q_group_size")
    if bits != AWQ_BITS:
        raise ValueError(f"of {bits} bits are not read")
    if fields.get("zero_point") is False:
        raise ValueError("without zero points are not read")
    return Quantization(f"AWQ, {bits} bits, {_groups(size)}", (AwqLayout(size),))


def _fp8(fields: Mapping[str, Any]) -> Quantization:
    block = fields.get("weight_block_size")
    blocks = () if block is None else (_block("weight_block_size", block),)
    text = "a scale a tensor or output" if block is None else f"blocks of {block[0]} x {block[1]}"
    # `weight_scale` is AutoFP8's name.
    layouts = tuple(ScaledLayout(name, blocks) for name in ("weight_scale_inv", "weight_scale"))
    return Quantization(f"FP8, {text}", layouts, (Fp8ExpertsLayout(blocks),), ACTIVATIONS)


def _mxfp4(_fields: Mapping[str, Any]) -> Quantization:
    return Quantization("MXFP4, 4 bits, groups of 32", (), (Mxfp4ExpertsLayout(),))


def _compressed_tensors(fields: Mapping[str, Any]) -> Quantization:
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(one, dict) for one in groups.values()):
        raise ValueError("without config_groups are not read")
    sparsity = _fields(fields, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise ValueError(f"that are sparse ({sparsity}) are not read")
    if _fields(fields, "transform_config").get("config_groups"):
        raise ValueError("with a transform_config (rotated weights) are not read")
    # With mixed precision, each group has its own format.
    formats = {str(group.get("format") or fields.get("format")) for group in groups.values()}
    for name in sorted(formats - SCALED_FORMATS - {PACKED_FORMAT}):
        raise ValueError(f"in the format {name!r} are not read")
    weights = [_fields(group, "weights") for group in groups.values() if group.get("weights")]
    bits = {_number(weight, "num_bits") for weight in weights}
    text = f"compressed-tensors, {' and '.join(sorted(formats))}, {_listed(bits)} bits"
    return Quantization(text, _layouts(formats, bits, weights), ignored=ACTIVATIONS)


def _layouts(
    formats: set[str], bits: set[int], weights: list[Mapping[str, Any]]
) -> tuple[Layout, ...]:
    """The layouts of compressed-tensors; a module's tensor names select one."""
    layouts: list[Layout] = []
    if PACKED_FORMAT in formats:
        readable = sorted(bits.intersection(PACKED_BITS))
        if not readable:
            raise ValueError(f"packed in {_listed(bits)} bits are not read")
        layouts.append(PackedLayout(tuple(readable)))
    if formats & SCALED_FORMATS:
        sizes = [weight.get("block_structure") for weight in weights]
        blocks = {_block("block_structure", size) for size in sizes if size}
        layouts.append(ScaledLayout("weight_scale", tuple(sorted(blocks))))
    return tuple(layouts)


METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
}


def _fields(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"whose {name} is {value!r} are not read")
    return value


def _number(fields: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise ValueError(f"whose config has no number {names[0]} are not read")


def _group_size(fields: Mapping[str, Any], *names: str) -> int:
    size = _number(fields, *names)
    if size < 1 and size != -1:
        raise ValueError(f"in groups of {size} are not read")
    return size


def _block(name: str, value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        # As older versions of compressed-tensors write it: 128x128.
        value = [int(side) if side.isdecimal() else side for side in value.split("x")]
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"whose {name} is {value!r} are not read")
    if not all(isinstance(size, int) and size > 0 for size in value):
        raise ValueError(f"whose {name} is {value!r} are not read")
    return value[0], value[1]


def _groups(size: int) -> str:
    return "one group an output" if size == -1 else f"groups of {size}"


def _listed(bits: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(bits)))
