"""The effect of `batch_invariant: on` on a stage on a GPU, and its requirements.

On a CPU it requires the CPU kernels (`operator_switch.py`).
"""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import ConfigError
from ...kernels.dispatch import Machine, triton_obstacle
from ..layers.invariant_layers import make_invariant
from ..layers.model_slice import ModelSlice
from .options import StageOptions

FIELD = "batch_invariant"


def invariant_options(options: StageOptions, machine: Machine) -> StageOptions:
    """`options` with attention that splits a context independently of the batch.

    Raises `ConfigError` (`batch_invariant`) if another setting, or the machine, does not support
    it.
    """
    if options.attention not in ("auto", "triton"):
        raise ConfigError(
            FIELD, f"on needs draftline's own attention on a GPU, and attention is "
            f"{options.attention}: use attention: triton or auto, or batch_invariant: auto",
        )  # fmt: skip
    if options.quantization != "none":
        raise ConfigError(
            FIELD, f"on has no products of weights in {options.quantization}: use "
            "quantization: none, or batch_invariant: auto",
        )  # fmt: skip
    obstacle = triton_obstacle(machine)
    if obstacle is not None:
        raise ConfigError(
            FIELD, f"on needs draftline's kernels on a GPU: {obstacle}; or use "
            "batch_invariant: auto",
        )  # fmt: skip
    return replace(options, attention="triton")


def invariant_slice(part: ModelSlice) -> ModelSlice:
    """`part` with batch-invariant products.

    Raises `ConfigError` (`batch_invariant`) for layers that draftline's kernels do not support.
    """
    if not part.fast:
        raise ConfigError(
            FIELD, "on needs layers that draftline's kernels know, and these of "
            f"{part.config.model_type} are others: use batch_invariant: auto",
        )  # fmt: skip
    return make_invariant(part)
