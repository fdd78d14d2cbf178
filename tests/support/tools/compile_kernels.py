"""Compiles the Triton kernels for GPUs of compute capability 9.0 and 8.9, without one.

Run as a program, in a process of its own: Triton decides once whether it interprets. Prints a line
a kernel: its name, what it was compiled for, and what it takes.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from draftline.kernels import shared_kernels
from draftline.kernels.attention import paged_attention
from draftline.kernels.attention import tree_attention_kernels as attention_kernels
from draftline.kernels.attention.spec import AttentionShape
from draftline.kernels.attention.tile_plan import TILE_LINES, SplitRule
from draftline.kernels.elementwise import elementwise_kernels
from draftline.kernels.elementwise.ops import LOGITS_CHUNK
from draftline.kernels.kv import kv_cache_kernels as kv_kernels
from draftline.kernels.linear import few_rows, linear_kernels
from draftline.kernels.linear import product as linear_product
from draftline.kernels.quantized import quantized_kernels
from draftline.kernels.quantized.kept_weight import keep_weight
from draftline.kernels.recurrence import tree_kernels
from draftline.kernels.shared_kernels import dot_type, triton_type
from support.tools.machine_code import Resources, publishes, resources, waits_first
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
OPTIONS = ("num_warps", "num_stages")
# Bytes that a block may have, by compute capability.
MOST_SHARED = {90: 227 * 1024, 89: 99 * 1024}
HEAD_DIMS = (64, 96, 128, 256)
# Rank and rotated part of DeepSeek-V3's.
LATENT = (512, 64)
# Bytes a thread that registers may spill; and of plain kernels. The compiler spills a number or two
# where that lets more blocks run at once; Triton 3.6 some more, outside the loops.
IS_OLD = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7)
MOST_STACK, MOST_STACK_OF_LEAN = 160, 96 if IS_OLD else 40
# The code of 1 in e4m3.
ONE = 0x38


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int = 90,
    **options: Any,
) -> Resources:  # fmt: skip
    """`types` of the arguments that are not `i32`; returns what it takes.

    Addresses and strides are known to be multiples of 16, as at run time: loads take more shared
    memory then.
    """
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    assert set(types) | set(constants) <= set(kernel.arg_names)
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.startswith("stride")
    }
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    binary = triton.compile(source, target=target, options=options | paged_attention.FUSED)
    assert len(binary.asm["cubin"]) > 0
    assert re.search(rf"\.target sm_{capability}", binary.asm["ptx"])
    assert not options.get("launch_pdl") or waits_first(binary.asm["ptx"])
    assert kernel is not attention_kernels.attend_tiles or publishes(binary.asm["ptx"])
    assert binary.metadata.shared <= MOST_SHARED[capability], binary.metadata.shared
    return resources(binary)


def attention_cases() -> Iterator[tuple[str, Resources]]:
    for dtype, head_dim, lines in itertools.product(NAMES, HEAD_DIMS, TILE_LINES):
        rule = SplitRule.of(AttentionShape(32, 8, head_dim), 1, dtype.itemsize)
        if lines > rule.tile_lines:
            continue
        for capability, plain in itertools.product(MOST_SHARED, (True, False)):
            facts = attention(
                dtype, head_dim, NAMES[dtype], lines, plain=plain, capability=capability
            )
            kind = "plain" if plain else "with window, softcap and sums"
            yield f"attend_tiles {NAMES[dtype]} {head_dim} {lines} sm_{capability} {kind}", facts
    for dtype, capability in itertools.product(NAMES, MOST_SHARED):
        rule = SplitRule.of(AttentionShape.of_latents(128, *LATENT), 1, dtype.itemsize)
        for lines in (lines for lines in TILE_LINES if lines <= rule.tile_lines):
            facts = attention(
                dtype, LATENT[0], NAMES[dtype], lines,
                plain=True, capability=capability, rotated_dim=LATENT[1],
            )  # fmt: skip
            yield f"attend_tiles {NAMES[dtype]} latents {lines} sm_{capability}", facts
    for lines, by_row in itertools.product(TILE_LINES, (False, True)):
        facts = attention(torch.bfloat16, 128, "fp8e4nv", lines, by_row=by_row)
        yield f"attend_tiles bf16 128 {lines} fp8{' by row' if by_row else ''}", facts


def attention(
    dtype: torch.dtype, head_dim: int, stored: str, lines: int = 64,
    *, plain: bool = False, by_row: bool = False, capability: int = 90, rotated_dim: int = 0,
) -> Resources:  # fmt: skip
    """Raises where no copy is under way while a tile is multiplied, or registers do not suffice."""
    dims = triton.next_power_of_2(head_dim)
    options = paged_attention.tile_options(dims, dtype, lines)
    pointers = dict.fromkeys(
        (
            "item_count",
            "items",
            "requests",
            "positions",
            "own_slots",
            "own_positions",
            "first_blocks",
            "blocks",
            "arrived",
        ),
        "*i32",
    ) | dict.fromkeys(("log_sums", "scales", "partial_out", "partial_sums"), "*fp32")
    types = pointers | {
        "query": f"*{NAMES[dtype]}", "out": f"*{NAMES[dtype]}", "pairs": f"*{stored}",
        "ancestors": "*i64", "scaling": "fp32", "softcap": "fp32",
    }  # fmt: skip
    constants = {
        "BLOCK_SIZE": 16, "SHARE": 4, "HEAD_DIM": head_dim, "DIMS": dims,
        "ROTATED_DIM": rotated_dim, "ROTATED_DIMS": rotated_dim or 16,
        "LINES": lines, "HAS_WINDOW": not plain, "HAS_SOFTCAP": not plain,
        "HAS_SCALES": stored == "fp8e4nv" and not by_row, "BY_ROW": by_row, "HAS_SUMS": not plain,
        "KEEP": triton_type(dtype),
        **{name: value for name, value in options.items() if name not in OPTIONS},
    }  # fmt: skip
    chosen = {name: options[name] for name in OPTIONS}
    taken = compiled(attention_kernels.attend_tiles, types, constants, capability, **chosen)
    # The first wait is in the loop over the context: keys and values of a tile may be missing.
    # Latents in float32 have no room for that.
    assert taken.waits[0] > 0 or options["num_stages"] < paged_attention.NUM_STAGES, taken
    # What bounds and windows add, and numbers that are made wider, may spill a little more.
    is_lean = plain and stored != "fp8e4nv"
    assert taken.stack <= (MOST_STACK_OF_LEAN if is_lean else MOST_STACK), taken
    return taken


def storing(stored: str, *, by_row: bool = False) -> Resources:
    types = {
        "keys": "*bf16", "values": "*bf16", "pairs": f"*{stored}", "slots": "*i32",
        "scales": "*fp32",
    }  # fmt: skip
    constants = {
        "NUM_HEADS": 8, "HEADS": 8, "HEAD_DIM": 80, "DIMS": 128,
        "HAS_SCALES": stored != "bf16" and not by_row, "BY_ROW": by_row, "IS_FP8": stored != "bf16",
    }  # fmt: skip
    return compiled(kv_kernels.store_rows, types, constants)


# Of MXFP4 the scales are powers of two.
SCALES = {"e2m1": "*u8"}


def weight_form(kind: str, group: int) -> dict[str, int]:
    """Constants of a weight; `group`: inputs of a group, 0: all."""
    codes = torch.full((2, 1024), 200 if kind == "uint8" else 9, dtype=torch.uint8)
    num_groups = 1024 // group if group else 1
    scales = torch.ones(2, num_groups)
    zeros = scales.cumsum(1) if kind == "uint4" else None
    group_of = torch.arange(1024) // (group or 1024)
    if kind in ("e4m3", "e2m1"):
        # The second has all numbers that are 1 alone.
        codes = (codes if kind == "e4m3" else torch.full_like(codes, ONE)).view(torch.float8_e4m3fn)
    found = keep_weight(codes, scales, zeros, group_of, scales if kind == "minima" else None)
    assert found is not None
    return quantized_kernels.form(found)


def multiplying(
    kind: str, group: int, num_rows: int, dtype: torch.dtype, capability: int, *, is_gated: bool
) -> Resources:  # fmt: skip
    """Raises where no weights are under way while others are multiplied, or registers spill."""
    form = weight_form(kind, group)
    sizes = quantized_kernels.tile_sizes(num_rows, form["TILE"], dtype)
    tile_bytes = quantized_kernels.tile_bytes(sizes, form["BITS"], dtype, is_gated=is_gated)
    wanted = shared_kernels.STAGES_OF_GATED if is_gated else shared_kernels.STAGES_ALONE
    facts = MOST_SHARED[capability], divmod(capability, 10)
    types = dict.fromkeys(("x", "bias", "out"), f"*{NAMES[dtype]}")
    types |= {"codes": "*u8", "scales": SCALES.get(kind, "*fp32"), "offsets": "*fp32"}
    options = {
        "num_warps": quantized_kernels.num_warps(sizes["ROWS"], is_gated=is_gated),
        "num_stages": shared_kernels.stages_within(wanted, tile_bytes, *facts),
    }
    depends = capability >= 90
    constants = {
        **form, **sizes, "IS_WHOLE": True, "HAS_BIAS": is_gated, "IS_GATED": is_gated,
        "IS_GELU": False, "DOT": dot_type(dtype), "DEPENDS": depends,
    }  # fmt: skip
    kernel = quantized_kernels.multiply_quantized
    taken = compiled(kernel, types, constants, capability, launch_pdl=depends, **options)
    assert taken.waits[0] > 0, taken
    assert taken.stack <= MOST_STACK, taken
    return taken


def widening(kind: str, group: int) -> Resources:
    scales = SCALES.get(kind, "*fp32")
    types = {"codes": "*u8", "scales": scales, "offsets": "*fp32", "out": "*bf16"}
    constants = weight_form(kind, group) | {"LINES": quantized_kernels.LINES}
    return compiled(quantized_kernels.widen_quantized, types, constants)


def multiplying_alike(
    dtype: torch.dtype, capability: int, num_outputs: int, *, by_outputs: bool
) -> Resources:
    """`by_outputs`: the weight lies output by output, as that of a head does."""
    sizes = linear_product.tile_sizes(num_outputs, dtype)
    types = dict.fromkeys(("x", "weight", "bias", "out"), f"*{NAMES[dtype]}")
    options = {name: linear_product.LAUNCH[name] for name in OPTIONS}
    unit = "stride_input" if by_outputs else "stride_output"
    constants = {**sizes, "IS_WHOLE": True, "HAS_BIAS": True, "DOT": dot_type(dtype), unit: 1}
    return compiled(linear_kernels.multiply_rows, types, constants, capability, **options)


def multiplying_few(
    num_rows: int, dtype: torch.dtype, capability: int, *, is_gated: bool
) -> Resources:
    """Raises where no weights are under way while others are multiplied, or registers spill."""
    sizes = few_rows.tile_sizes(num_rows, dtype)
    tile_bytes = few_rows.tile_bytes(sizes, dtype, is_gated=is_gated)
    wanted = shared_kernels.STAGES_OF_GATED if is_gated else shared_kernels.STAGES_ALONE
    facts = MOST_SHARED[capability], divmod(capability, 10)
    types = dict.fromkeys(("x", "weight", "bias", "out"), f"*{NAMES[dtype]}")
    options = {
        "num_warps": few_rows.LAUNCH["num_warps"],
        "num_stages": shared_kernels.stages_within(wanted, tile_bytes, *facts),
    }
    depends = capability >= 90
    constants = {
        **sizes, "IS_WHOLE": True, "HAS_BIAS": False, "IS_GATED": is_gated, "IS_GELU": False,
        "DOT": dot_type(dtype), "DEPENDS": depends,
    }  # fmt: skip
    kernel = linear_kernels.multiply_few_rows
    taken = compiled(kernel, types, constants, capability, launch_pdl=depends, **options)
    assert taken.waits[0] > 0, taken
    assert taken.stack == 0, taken
    return taken


def multiplying_normed(num_rows: int, dtype: torch.dtype, capability: int) -> Resources:
    """Raises where no weights are under way while others are multiplied, or registers spill."""
    sizes = few_rows.tile_sizes(num_rows, dtype)
    tile_bytes = few_rows.tile_bytes(sizes, dtype, is_gated=False)
    facts = MOST_SHARED[capability], divmod(capability, 10)
    types = dict.fromkeys(("x", "weight", "out"), f"*{NAMES[dtype]}") | {"eps": "fp32"}
    options = {
        "num_warps": few_rows.LAUNCH["num_warps"],
        "num_stages": shared_kernels.stages_within(shared_kernels.STAGES_ALONE, tile_bytes, *facts),
    }
    depends = capability >= 90
    constants = {
        **sizes, "NUM_NORMS": 4, "SIZE": 4096, "DOT": dot_type(dtype), "DEPENDS": depends,
    }  # fmt: skip
    kernel = linear_kernels.multiply_normed_rows
    taken = compiled(kernel, types, constants, capability, launch_pdl=depends, **options)
    assert taken.waits[0] > 0, taken
    assert taken.stack <= MOST_STACK_OF_LEAN, taken
    return taken


def normalising_logits() -> Resources:
    types = dict.fromkeys(("logits", "out"), "*fp32")
    kernel = elementwise_kernels.take_log_softmax
    return compiled(kernel, types, {"LEN": LOGITS_CHUNK}, num_warps=8)


def copying() -> Resources:
    types = dict.fromkeys(("source", "target", "source_rows", "target_rows"), "*i32")
    types |= {"source_rows": "*i64", "target_rows": "*i64"}
    constants = {"FROM_LIST": True, "TO_LIST": False, "CHUNK_LEN": 1024}
    return compiled(kv_kernels.copy_rows, types, constants)


def solving(
    num_decays: int, capability: int, dims: tuple[int, int] = (128, 128), *, corrects: bool
) -> Resources:
    """Raises where no keys are under way while others are multiplied, or registers spill."""
    key_dim, value_dim = dims
    types = dict.fromkeys(("states", "keys", "log_decays", "deltas", "totals"), "*fp32")
    types |= dict.fromkeys(("values", "rates", "queries", "outputs"), "*fp32")
    types |= dict.fromkeys(("requests", "columns", "sees"), "*i32")
    constants = {
        "NUM_HEADS": 32, "NUM_KEY_HEADS": 16, "KEY_DIM": key_dim, "VALUE_DIM": value_dim,
        "DECAYS": num_decays, "CORRECTS": corrects,
        **tree_kernels.tile_sizes(key_dim, value_dim, num_decays),
    }  # fmt: skip
    num_warps = tree_kernels.LAUNCH["num_warps"]
    taken = compiled(tree_kernels.solve_requests, types, constants, capability, num_warps=num_warps)
    assert taken.waits[0] > 0, taken
    assert taken.stack <= MOST_STACK_OF_LEAN, taken
    return taken


def compile_few() -> None:
    """Every kernel in the form that a GPU of compute capability 9.0 takes for bfloat16."""
    bf16 = torch.bfloat16
    print("attend_tiles bf16 128 64", attention(bf16, 128, "bf16", 64, plain=True))
    rank, rotated = LATENT
    latents = attention(bf16, rank, "bf16", 32, plain=True, rotated_dim=rotated)
    print("attend_tiles bf16 latents 32", latents)
    print("multiply_quantized bf16 64", multiplying("uint4", 128, 64, bf16, 90, is_gated=True))
    print("widen_quantized", widening("uint4", 128))
    print("multiply_rows bf16 8192", multiplying_alike(bf16, 90, 8192, by_outputs=True))
    print("multiply_few_rows bf16 1", multiplying_few(1, bf16, 90, is_gated=False))
    print("multiply_normed_rows bf16 1", multiplying_normed(1, bf16, 90))
    print("store_rows bf16", storing("bf16"))
    print("take_log_softmax", normalising_logits())
    print("copy_rows", copying())
    print("solve_requests", solving(1, 90, corrects=True))


def main(which: str) -> None:
    """`all`, or `few`: each kernel once or twice."""
    if which == "few":
        compile_few()
        return
    for name, facts in attention_cases():
        print(name, facts)
    few = [(1, torch.bfloat16, False), (64, torch.bfloat16, True), (64, torch.float32, True)]
    largest = (65, torch.bfloat16, True)
    forms = [("uint4", 128, case) for case in [*few, largest, (65, torch.float32, False)]]
    others = (("uint8", 0), ("e4m3", 128), ("e2m1", 32), ("minima", 32))
    forms += [(*form, largest) for form in others]
    for (kind, group, case), capability in itertools.product(forms, MOST_SHARED):
        num_rows, dtype, is_gated = case
        facts = multiplying(kind, group, num_rows, dtype, capability, is_gated=is_gated)
        name = f"{kind} {group} {NAMES[dtype]} {num_rows}"
        print(f"multiply_quantized {name} sm_{capability}", facts)
    print("widen_quantized", widening("e4m3", 128))
    cases = [
        (torch.bfloat16, 8192, True),
        (torch.bfloat16, 1024, False),
        (torch.float32, 8192, False),
    ]
    for (dtype, num_outputs, by_outputs), capability in itertools.product(cases, MOST_SHARED):
        facts = multiplying_alike(dtype, capability, num_outputs, by_outputs=by_outputs)
        print(f"multiply_rows {NAMES[dtype]} {num_outputs} sm_{capability}", facts)
    for (num_rows, dtype, is_gated), capability in itertools.product(few, MOST_SHARED):
        facts = multiplying_few(num_rows, dtype, capability, is_gated=is_gated)
        print(f"multiply_few_rows {NAMES[dtype]} {num_rows} sm_{capability}", facts)
    for (num_rows, dtype, _), capability in itertools.product(few, MOST_SHARED):
        facts = multiplying_normed(num_rows, dtype, capability)
        print(f"multiply_normed_rows {NAMES[dtype]} {num_rows} sm_{capability}", facts)
    print("store_rows bf16", storing("bf16"))
    for by_row in (False, True):
        print("store_rows fp8", storing("fp8e4nv", by_row=by_row))
    print("take_log_softmax", normalising_logits())
    print("copy_rows", copying())
    rules = [((1, True), (128, 128)), ((128, True), (128, 128)), ((1, False), (256, 64))]
    for ((num_decays, corrects), dims), capability in itertools.product(rules, MOST_SHARED):
        facts = solving(num_decays, capability, dims, corrects=corrects)
        print(f"solve_requests {num_decays} {dims} sm_{capability}", facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
