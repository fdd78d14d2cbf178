"""A whole model as a stage: by draftline's own modules if they support it, else by
transformers'."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...core.steps import StepInput, StepOutput
from ..load.model_info import ModelInfo
from ..load.partition import LayerSpan
from ..load.supported import SUPPORTED
from ..stage.options import StageOptions
from ..stage.stage import load_stage
from .hosted_stage import load_hosted_stage


class AnyStage(Protocol):
    """Runs steps on a whole model."""

    def run(self, step: StepInput, hidden: None = None) -> Tensor | StepOutput:
        """The answer to a step."""
        ...


def load_any_stage(
    info: ModelInfo, num_blocks: int, block_size: int, options: StageOptions, *,
    dtype: str, device: str, with_trees: bool = False,
) -> AnyStage:  # fmt: skip
    """Load a model.

    with_trees  whether steps will have trees
    options     of a `Stage`; of a `HostedStage` its output vocabulary and quantization alone

    Raises `CheckpointError`, or `ConfigError` naming the setting.
    """
    if info.model_type in SUPPORTED:
        span = LayerSpan(0, info.num_layers, info.num_layers)
        return load_stage(
            info.path, span, num_blocks, block_size, dtype=dtype, device=device, options=options
        )
    return load_hosted_stage(
        info.path, num_blocks, block_size,
        dtype=dtype, device=device, quantization=options.quantization, output=options.output,
        with_trees=with_trees,
    )  # fmt: skip
