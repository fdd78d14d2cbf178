"""Which implementation of attention and of the other operators runs, chosen once at load."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from ..core.errors import ConfigError
from .elementwise.reference import HeadNorms, KvTarget

# Triton's own variable; if it is not set, Triton need not be imported to check for the interpreter.
INTERPRET = "TRITON_INTERPRET"
BACKENDS = ("sdpa", "triton", "flash_attn")
# Ampere: the first with bfloat16, which both packages need.
LEAST_CAPABILITY = (8, 0)
# FlashAttention 2 reads paged KV in pages of whole multiples of this.
FLASH_BLOCK = 256
# Ada: the first that converts e4m3.
LEAST_FP8_CAPABILITY = (8, 9)
# From the first version with softcap, to before the first with another interface.
FLASH_VERSIONS = SpecifierSet(">=2.6.3,<3")
FLASH_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that determine the backend; `capability` is the GPU's compute capability, None on a
    CPU."""

    capability: tuple[int, int] | None
    has_triton: bool
    has_flash_attn: bool
    is_interpreting: bool = False

    @classmethod
    def of(cls, device: str | torch.device) -> Machine:
        """This machine, as seen by a stage on `device`."""
        is_gpu = torch.device(device).type == "cuda"
        has_triton = find_spec("triton") is not None
        return cls(
            torch.cuda.get_device_capability(device) if is_gpu else None,
            has_triton,
            is_gpu and (flash_version() or "0") in FLASH_VERSIONS,
            has_triton and INTERPRET in os.environ and _is_interpreting(),
        )


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The backend that was picked, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class KernelOps:
    """Operators of one implementation.

    `kernels/attention/reference.py` and `kernels/kv/reference.py` define them.
    """

    paged_attention: Callable[..., None]
    write_kv: Callable[..., None]
    move_kv: Callable[[Tensor, Tensor], None]


def choose_attention(
    machine: Machine, dtype: torch.dtype, block_size: int, wanted: str = "auto",
    *, has_latents: bool = False,
) -> AttentionChoice:  # fmt: skip
    """The backend for a stage that computes in `dtype`; `has_latents`: over one of latents.

    Raises `ConfigError` (`attention`) where `wanted` is unknown or cannot run here.
    """
    obstacles = {
        "sdpa": None,
        "triton": triton_obstacle(machine),
        "flash_attn": flash_obstacle(machine, dtype, block_size),
    }
    if has_latents:
        obstacles["flash_attn"] = "it reads no latents"
    if wanted == "auto":
        return _best(machine, obstacles)
    if wanted not in obstacles:
        raise ConfigError("attention", f"must be auto, {', '.join(BACKENDS)}, not {wanted!r}")
    obstacle = obstacles[wanted]
    if obstacle is not None:
        raise ConfigError("attention", f"cannot be {wanted}: {obstacle}; or use auto")
    return AttentionChoice(wanted, "asked for")


def flash_version() -> str | None:
    """The installed version of flash-attn."""
    try:
        return version("flash-attn")
    except PackageNotFoundError:
        return None


def triton_obstacle(machine: Machine) -> str | None:
    """Why the Triton kernels cannot run on the machine; None where they can."""
    if not machine.has_triton:
        return "the package triton is not installed; pip install draftline[gpu]"
    if machine.capability is None:
        on_cpu = "it needs a GPU, or TRITON_INTERPRET=1 for tests"
        return None if machine.is_interpreting else on_cpu
    if machine.capability < LEAST_CAPABILITY:
        return "the GPU's compute capability is below 8.0"
    return None


def flash_obstacle(machine: Machine, dtype: torch.dtype, block_size: int) -> str | None:
    """Why FlashAttention does not run on the machine for such a stage; None where it does."""
    # The Triton kernels compute the attention of trees beside it.
    obstacle = triton_obstacle(machine)
    if machine.capability is None:
        return "it needs a GPU"
    if obstacle is not None:
        return obstacle
    if not machine.has_flash_attn:
        return (
            f"the package flash-attn is not installed, or not of {FLASH_VERSIONS}; "
            "pip install draftline[flash-attn]"
        )
    if dtype not in FLASH_DTYPES:
        return "it computes in float16 and bfloat16 only"
    if block_size % FLASH_BLOCK:
        return f"block_size is no multiple of {FLASH_BLOCK}"
    return None


def runs_triton(machine: Machine) -> bool:
    """Whether the machine has a GPU that the Triton kernels run on."""
    return machine.capability is not None and triton_obstacle(machine) is None


def load_quantized_linear(name: str) -> Callable[..., Tensor]:
    """The `quantized_linear` of `triton` or `reference`, in `kernels/quantized/reference.py`."""
    if name == "reference":
        from .quantized import reference as product  # noqa: PLC0415
    else:
        from .quantized import quantized_kernels as product  # noqa: PLC0415
    return product.quantized_linear


def load_invariant_linear(name: str) -> Callable[..., Tensor]:
    """The `invariant_linear` of `triton` or `reference`, in `kernels/linear/reference.py`."""
    if name == "reference":
        from .linear import reference as product  # noqa: PLC0415
    else:
        from .linear import product  # noqa: PLC0415
    return product.invariant_linear


def load_few_rows_linear(name: str) -> Callable[..., Tensor]:
    """The `few_rows_linear` of `triton` or `reference`, in `kernels/linear/reference.py`."""
    if name == "reference":
        from .linear import reference as product  # noqa: PLC0415
    else:
        from .linear import few_rows as product  # noqa: PLC0415
    return product.few_rows_linear


def load_normed_linear(name: str) -> Callable[..., Tensor]:
    """The `normed_linear` of `triton` or `reference`, in `kernels/linear/reference.py`."""
    if name == "reference":
        from .linear import reference as product  # noqa: PLC0415
    else:
        from .linear import few_rows as product  # noqa: PLC0415
    return product.normed_linear


def choose_for_fp8(machine: Machine, wanted: str = "auto") -> AttentionChoice:
    """The backend for a KV cache of FP8 numbers, which the Triton kernels alone read.

    Raises `ConfigError` (`kv_cache_dtype`).
    """
    obstacle = triton_obstacle(machine)
    if machine.capability is not None and machine.capability < LEAST_FP8_CAPABILITY:
        obstacle = obstacle or "the GPU's compute capability is below 8.9"
    if wanted not in ("auto", "triton"):
        obstacle = f"attention is {wanted}"
    if obstacle is not None:
        raise ConfigError("kv_cache_dtype", f"cannot be fp8, read by triton: {obstacle}; use auto")
    return AttentionChoice("triton", "the KV cache is fp8")


def load_ops(name: str) -> KernelOps:
    """The operators of `triton` or `reference`; Triton is imported only where it is used."""
    if name == "reference":
        from .attention import reference as attention  # noqa: PLC0415
        from .kv import reference as kv  # noqa: PLC0415
    else:
        from .attention import paged_attention as attention  # noqa: PLC0415
        from .kv import kv_cache_kernels as kv  # noqa: PLC0415
    return KernelOps(attention.paged_attention, kv.write_kv, kv.move_kv)


def _best(machine: Machine, obstacles: dict[str, str | None]) -> AttentionChoice:
    if machine.capability is None:
        return AttentionChoice("sdpa", "no GPU")
    if obstacles["triton"] is not None:
        return AttentionChoice("sdpa", f"not triton: {obstacles['triton']}")
    if obstacles["flash_attn"] is None:
        return AttentionChoice("flash_attn", "it is installed, and pages are long enough")
    return AttentionChoice("triton", f"a GPU; not flash_attn: {obstacles['flash_attn']}")


def _is_interpreting() -> bool:
    from triton import knobs  # noqa: PLC0415

    return bool(knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """How layers that keep states are computed; `kernels/recurrence/walk.py` defines it.

    solve        its last argument says where rows go on from:
    wants_order  an order, as `walk`; else `StepTables`
    """

    solve: Callable[..., Tensor]
    wants_order: bool


def choose_recurrence(machine: Machine, *, by_cpu_kernels: bool) -> str:
    """The name for `load_recurrence` on a machine, whose CPU kernels may be loaded."""
    if machine.capability is None:
        return "cpu_kernels" if by_cpu_kernels else "walk"
    return "tree_form" if triton_obstacle(machine) else "triton"


def load_recurrence(name: str) -> Recurrence:
    """Path by path, with the bits of each path: `walk` or `cpu_kernels`, which must be loaded. All
    nodes of a tree at once: `tree_form` or `triton`.
    """
    if name == "cpu_kernels":
        return Recurrence(torch.ops.draftline.recurrence, wants_order=True)
    if name == "walk":
        from .recurrence.walk import walk  # noqa: PLC0415

        return Recurrence(walk, wants_order=True)
    if name == "tree_form":
        from .recurrence import tree_form as trees  # noqa: PLC0415
    else:
        from .recurrence import tree_kernels as trees  # noqa: PLC0415
    return Recurrence(trees.solve_step, wants_order=False)


@dataclass(frozen=True, slots=True)
class ElementwiseOps:
    """Row-wise operators; `kernels/elementwise/reference.py` defines them."""

    rms_norm: Callable[..., None]
    rotate: Callable[[Tensor, Tensor, Tensor], None]
    turn_and_store: Callable[[Tensor, Tensor, Tensor, HeadNorms | None, KvTarget], None]
    gated: Callable[[Tensor, Tensor, str], None]
    log_softmax: Callable[[Tensor, Tensor], None]


def load_elementwise(name: str) -> ElementwiseOps:
    """The operators of `triton` or `reference`; Triton is imported only where it is used."""
    if name == "reference":
        from .elementwise import reference as ops  # noqa: PLC0415
    else:
        from .elementwise import ops  # noqa: PLC0415
    return ElementwiseOps(ops.rms_norm, ops.rotate, ops.turn_and_store, ops.gated, ops.log_softmax)
