"""gpt-oss's experts in MXFP4: blocks of 32 numbers of 4 bits with a power of two (OCP MX)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ....core.errors import CheckpointError
from ..checkpoint import WeightFiles, listed

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4Files:
    """`x_blocks` and `x_scales` are read as `x`, [experts, inputs, outputs] in `dtype`.

    x_blocks  uint8 [experts, outputs, groups, 16]  two numbers a byte
    x_scales  uint8 [experts, outputs, groups]      exponents, from -127 on
    """

    def __init__(self, files: WeightFiles, dtype: torch.dtype, device: torch.device) -> None:
        """`device`: where the numbers are computed. Raises `CheckpointError` for lost scales."""
        self._files, self._dtype, self._device = files, dtype, device
        stored = files.names
        self._packed = {name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)}
        missing = sorted({f"{name}{SCALES}" for name in self._packed} - stored)
        if missing:
            raise CheckpointError(f"{files.folder}: {listed(missing)} missing; fetch it again")

    @property
    def folder(self) -> Path:
        """Of the checkpoint."""
        return self._files.folder

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors, as a plain checkpoint would have them."""
        parts = {f"{name}{part}" for name in self._packed for part in (BLOCKS, SCALES)}
        return (self._files.names - parts) | self._packed

    def is_incidental(self, name: str) -> bool:
        """Whether a tensor without a place in the model can be ignored."""
        return self._files.is_incidental(name)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The named tensors, in any order. Raises `CheckpointError`."""
        wanted = set(names)
        yield from self._files.read(wanted - self._packed)
        for name in sorted(wanted & self._packed):
            both = dict(self._files.read([f"{name}{BLOCKS}", f"{name}{SCALES}"]))
            blocks, scales = (both[f"{name}{part}"].to(self._device) for part in (BLOCKS, SCALES))
            if blocks.shape[:-1] != scales.shape:
                raise CheckpointError(
                    f"{self.folder}: tensors of {name} do not fit each other; fetch the "
                    "checkpoint again"
                )
            yield name, convert_moe_packed_tensors(blocks, scales, dtype=self._dtype)
