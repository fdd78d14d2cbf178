"""Runs a stage's layers, whoever prepares their inputs."""

from __future__ import annotations

from torch import Tensor

from ..attention.kernel_attention import StepKernels
from ..attention.step_attention import StepAttention
from .model_slice import ModelSlice
from .rotary import Rotation


def run_layers(
    part: ModelSlice, states: Tensor, positions: Tensor,
    rotations: dict[str | None, Rotation], attention: StepAttention | StepKernels,
) -> Tensor:  # fmt: skip
    """Hidden states [rows, hidden_size], in and out; `positions` int [rows]."""
    if not part.fast:
        states = states.unsqueeze(0)
    for layer, kind in zip(part.layers, part.layer_types, strict=True):
        states = layer.forward(
            states,
            attention_mask=attention,
            position_embeddings=rotations[kind if kind in rotations else None],
            position_ids=positions[None],
        )
    return states if part.fast else states[0]
