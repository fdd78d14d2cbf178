"""Compiles kernels of sampling and of what lies between products, as `compile_kernels.py` does.

Prints a line a kernel: its name, and registers or memory that it spills to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import triton
from draftline.kernels.elementwise import elementwise_kernels
from draftline.kernels.elementwise.ops import FUSED, norm_warps
from draftline.kernels.sampling import (
    edit_kernels,
    filter_kernels,
    sampling_kernels,
    threshold_kernels,
)
from draftline.kernels.sampling.choose import BISECT, BISECT_LEN, LAUNCH
from draftline.kernels.sampling.noise_kernels import EXACT
from support.tools.machine_code import resources, waits_first
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
TYPES = (
    dict.fromkeys(("logits", "bests", "winners", "temperatures", "top_p", "floors"), "*fp32")
    | dict.fromkeys(("biases", "factors", "scale", "out"), "*fp32")
    | dict.fromkeys(
        ("best_ids", "winner_ids", "histogram", "num_gathered", "top_k", "rows"), "*i32"
    )
    | dict.fromkeys(("masks", "bias_tokens", "tokens", "times", "path"), "*i32")
    | dict.fromkeys(("sums", "candidates", "thresholds", "keys"), "*i64")
    | dict.fromkeys(("x", "residual", "heads", "cos", "sin", "gate_up", "pairs"), "*bf16")
    | dict.fromkeys(("norm_scales", "kv_scales"), "*fp32")
    | {"doubt": "*i32", "slots": "*i32"}
)
CONSTANTS = {
    "LEN": 4096, "CHUNKS": 32, "ROOM": 4096, "BINS": 512, "IS_GATHERED": True, "SIZE": 4096,
    "WIDTH": 4096, "HAS_RESIDUAL": True, "NUM_HEADS": 40, "HEADS": 64, "HALF": 64, "IS_GELU": True,
    "NUM_KV_HEADS": 8, "HAS_NORMS": True, "HAS_SCALES": False, "IS_FP8": False,
    "BY_ROW": False, "DEPENDS": True,
}  # fmt: skip


def compiled(kernel: Any, options: dict[str, Any], **changes: Any) -> Any:
    """`changes` are constants, or types of arguments."""
    types = TYPES | {name: kind for name, kind in changes.items() if isinstance(kind, str)}
    constants = {name: changes.get(name, value) for name, value in CONSTANTS.items()}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    binary = triton.compile(ASTSource(kernel, signature, constants), target=TARGET, options=options)
    taken = resources(binary)
    print(kernel.fn.__name__, taken)
    assert taken.stack == 0, taken
    return binary


def main() -> None:
    sampling, filters = sampling_kernels, filter_kernels
    for logits in ("*fp32", "*bf16"):
        compiled(sampling.find_bests, LAUNCH, logits=logits)
        winners = compiled(sampling.find_winners, LAUNCH, logits=logits)
        # Bit by bit: each operation rounds on its own, and divisions are exact. The rough
        # logarithm has contractions of its own, of another name (`.ftz`).
        assert not re.search(r"fma\.rn\.f(32|64)", winners.asm["ptx"])
        assert "div.rn.f32" in winners.asm["ptx"]
        assert "div.rn.f64" in winners.asm["ptx"]
    noise = compiled(sampling.token_noise, EXACT, token_ids="*i64", noise="*fp32", LEN=64)
    assert not re.search(r"fma\.rn\.f64", noise.asm["ptx"])
    compiled(sampling.pick_tokens, EXACT | {"num_warps": 1}, out="*i32")
    for kernel in (filters.add_up, filters.gather):
        assert "div.rn.f32" in compiled(kernel, LAUNCH, scale="fp32").asm["ptx"]
    compiled(filters.find_doubt, EXACT, scale="fp32")
    for is_gathered in (True, False):
        compiled(
            threshold_kernels.find_thresholds,
            BISECT,
            scale="fp32",
            IS_GATHERED=is_gathered,
            LEN=BISECT_LEN,
        )
    compiled(edit_kernels.copy_allowed, LAUNCH)
    changes = compiled(edit_kernels.change_tokens, EXACT, LEN=256)
    assert "fma.rn.f32" not in changes.asm["ptx"]
    for name, arguments in between_products():
        kernel = getattr(elementwise_kernels, name)
        made = compiled(kernel, FUSED | arguments.pop("options", {}), out="*bf16", **arguments)
        if "DEPENDS" in kernel.arg_names:
            # Launched while the kernel before it ends.
            assert waits_first(made.asm["ptx"])
            assert "griddepcontrol.launch_dependents" in made.asm["ptx"]


def between_products() -> Iterator[tuple[str, dict[str, Any]]]:
    ahead = {"launch_pdl": True}
    yield "normalise", {"eps": "fp32", "options": ahead | {"num_warps": norm_warps(4096)}}
    turning = {"eps": "fp32", "WIDTH": 64, "options": ahead | {"num_warps": 1}}
    yield "turn_and_store", dict(turning)
    yield "turn_and_store", turning | {"HAS_SCALES": True, "IS_FP8": True, "pairs": "*fp8e4nv"}
    by_row = {"BY_ROW": True, "IS_FP8": True, "pairs": "*fp8e4nv"}
    yield "turn_and_store", turning | by_row
    yield "turn_heads", {"WIDTH": 64}
    yield "gate", {"LEN": 1024}


if __name__ == "__main__":
    main()
