"""Parts of the engine that a build may be without, and what to say then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ...core.types import SamplingRows
from ...kernels.dispatch import Machine
from ...models.model_slice import cut_slice
from ...models.sampler import choose_tokens

Choose = Callable[[Tensor, SamplingRows], Tensor]
MODELS, KERNELS = "draftline.models", "draftline.kernels"
# Graphs that are not captured by then are left out.
CAPTURE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSteps:
    """The largest steps that graphs are captured for."""

    max_rows: int
    max_requests: int
    max_positions: int


def find_sampler(device: torch.device) -> tuple[Choose, str]:
    """What a stage on `device` chooses tokens by, and its name."""
    try:
        backend: Any = import_module(f"{MODELS}.sampling_backend")
    except ModuleNotFoundError:
        return choose_tokens, "torch: there are no kernels for sampling"
    sampler = backend.choose_sampler(device)
    return sampler.choose, type(sampler).__name__


def slice_options(device: torch.device, attention: str) -> dict[str, bool]:
    """How a stage on `device` has its modules made, as `load_stage` decides it."""
    if "fused" not in signature(cut_slice).parameters:
        return {}
    dispatch: Any = import_module(f"{KERNELS}.sampling_dispatch")
    is_triton = dispatch.choose_sampling(Machine.of(device)) == "triton"
    return {"fused": is_triton and attention != "sdpa"}


def can_have_graphs(stage: Any, device: torch.device) -> bool:
    """Whether `use_graphs` captures any."""
    return device.type == "cuda" and hasattr(stage, "use_graphs") and stage.can_be_captured


def use_graphs(stage: Any, device: torch.device, steps: GraphSteps) -> dict[str, Any] | str:
    """Run the stage's steps by CUDA graphs from now on; what was captured, or why none is."""
    if not hasattr(stage, "use_graphs"):
        return "none: there is no graph runner"
    if not can_have_graphs(stage, device):
        return "none: they need a GPU, and attention by draftline's own kernels"
    runner_file: Any = import_module(f"{MODELS}.graph_runner")
    capture_file: Any = import_module(f"{MODELS}.graph_capture")
    options = runner_file.GraphOptions(**asdict(steps), seconds=CAPTURE_SECONDS)
    runner = stage.use_graphs(options, capture_file.CudaCapture(device))
    return asdict(runner.capture_all(time.monotonic))
