"""Multi-step decoding: several tokens of each request in one step of a single-stage model.

Without drafts, a step has one token a request, and the engine's overhead may take longer than the
pass. Here each token goes back into the first layer without leaving the stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ...core.arrays import Int32
from ...core.step.layout import kv_slots
from ...core.steps import StepInput, StepOutput
from ..attention.operator import advance
from ..device import to_device
from ..layers.fast_modules import Rotation
from ..layers.model_slice import embedded, is_table
from ..sampling import Sampler

if TYPE_CHECKING:
    from ..layers.own_layers import OwnLayers


CPU = torch.device("cpu")


class MultiStepDecoder:
    """Decodes by CPU kernels: embedding, layers and head of one model."""

    def __init__(
        self, own: OwnLayers, embed: nn.Module, softcap: float | None, sampler: Sampler
    ) -> None:
        """`softcap` of the logits, if any."""
        self._own = own
        self._embed = embed
        self._softcap = softcap
        self._sampler = sampler

    def run(
        self,
        step: StepInput,
        end_ids: Int32,
        rows: tuple[Int32, Int32],
        tables: Mapping[str | None, Rotation],
        said: Tensor | None = None,
    ) -> StepOutput:
        """The tokens of all passes of `rows`, within `attending`. Fewer if all answers end, or the
        next pass has logits that are not finite.

        Each token equals that of a single step, as the noise uses the positions of the rows. On
        return, the cache has the KV of all rows but the last.

        end_ids `MultiStepInput.end_ids`
        rows    `following_rows` of the step
        tables  of a flat `RotaryTable`, of all positions
        said    float32 [passes, rows, hidden_size]  is filled with the last layer's states
        """
        slots, positions = rows
        if is_table(self._embed) and step.sampling.is_unfiltered:
            decoded = self._own.decode(
                step.token_ids, slots, positions, self._embed, self._softcap, step.sampling,
                end_ids, tables, said,
            )  # fmt: skip
        else:
            decoded = self._pass_by_pass(step, end_ids, slots, positions, tables, said)
        # Decoding stops at a row that is not finite.
        not_finite = np.flatnonzero(decoded[0] < 0).astype(np.int32)
        if len(not_finite):
            decoded = np.maximum(decoded, np.int32(0))
        return StepOutput(
            step.step_id,
            decoded[0],
            decoded=np.ascontiguousarray(decoded.T),
            not_finite=not_finite if len(not_finite) else None,
        )

    def _pass_by_pass(
        self,
        step: StepInput,
        end_ids: Int32,
        slots: Int32,
        positions: Int32,
        tables: Mapping[str | None, Rotation],
        said: Tensor | None,
    ) -> Int32:
        """int32 [passes, rows], for models with another embedding or sampling than the fused
        kernel's."""
        decoded = np.empty(slots.shape, dtype=np.int32)
        has_ended = np.zeros(slots.shape[1], dtype=np.bool_)
        tokens, sampling = step.token_ids, step.sampling
        index = 0
        for index in range(len(slots)):
            if index:
                advance(slots[index], positions[index])
                sampling = replace(sampling, position=step.sampling.position + index)
            hidden = self._own(embedded(self._embed, to_device(tokens, CPU)), tables)
            if said is not None:
                said[index] = hidden
            logits = self._own.logits(hidden, self._softcap)
            tokens = decoded[index] = self._sampler.choose(logits, sampling).numpy()
            if (tokens < 0).any():
                return decoded[: max(index, 1)]
            has_ended |= (tokens[:, None] == end_ids).any(axis=1)
            if has_ended.all():
                break
        return decoded[: index + 1]


def following_rows(step: StepInput, num_passes: int, block_size: int) -> tuple[Int32, Int32]:
    """KV slots and positions of the rows of each pass, int32 [num_passes, rows] each."""
    positions = step.positions + np.arange(num_passes, dtype=np.int32)[:, None]
    owners = np.tile(np.arange(len(step.positions), dtype=np.int32), len(positions))
    slots = kv_slots(step.block_tables, owners, positions.ravel(), block_size)
    return slots.reshape(positions.shape), positions
