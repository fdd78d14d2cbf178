"""Rotary position embeddings of a step, looked up instead of computed."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]


class RotaryTable:
    """Cosines and sines of all positions, made by the model's own rotary module.

    The module's result for a position depends on nothing else (batch-dependent kinds are refused
    at load), so a row of the table equals what the module computes. Grows when needed.
    """

    def __init__(
        self, rotary: nn.Module, layer_types: Iterable[str], like: Tensor, *, flat: bool = False
    ) -> None:
        """`like` gives dtype and device of the hidden states.

        `flat` is for `FastAttention`: rotations are [rows, 1, width], and the first half of the
        sines is negated, which `rotate_half` does to the heads otherwise.
        """
        self._rotary = rotary
        self._like = like
        self._flat = flat
        by_type = "layer_type" in inspect.signature(rotary.forward).parameters
        self._types = tuple(sorted(set(layer_types))) if by_type else (None,)
        # Replaced when it grows: who holds one may go on to use it.
        self.tables: Mapping[str | None, Rotation] = {}
        self._num_positions = 0

    def rotations(self, positions: Tensor, largest: int) -> dict[str | None, Rotation]:
        """Cosine and sine [1, rows, width] by layer type (None: for all) at int64 `positions`.

        `largest` is the largest of them, known to the caller without waiting for a device.
        """
        if largest >= self._num_positions:
            self._grow(max(2 * self._num_positions, largest + 1, 256))
        return self.look_up(self.tables, positions)

    def look_up(
        self, tables: Mapping[str | None, Rotation], positions: Tensor
    ) -> dict[str | None, Rotation]:
        """As `rotations`, from `tables` of this object; `positions` int32 or int64."""
        axis = 0 if self._flat else 1
        return {
            layer_type: (cos.index_select(axis, positions), sin.index_select(axis, positions))
            for layer_type, (cos, sin) in tables.items()
        }

    def reserve(self, num_positions: int) -> None:
        """Hold the positions below `num_positions` from now on."""
        if num_positions > self._num_positions:
            self._grow(num_positions)

    def _grow(self, num_positions: int) -> None:
        self._num_positions = num_positions
        tables: dict[str | None, Rotation] = {}
        all_positions = torch.arange(self._num_positions, device=self._like.device)[None]
        for layer_type in self._types:
            kind = {} if layer_type is None else {"layer_type": layer_type}
            cos, sin = self._rotary(self._like, all_positions, **kind)
            tables[layer_type] = _flattened(cos, sin) if self._flat else (cos, sin)
        self.tables = tables


def _flattened(cos: Tensor, sin: Tensor) -> Rotation:
    sin = sin.clone()
    sin[..., : sin.shape[-1] // 2].neg_()
    return cos.transpose(0, 1).contiguous(), sin.transpose(0, 1).contiguous()
