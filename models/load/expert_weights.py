"""The matrices of a mixture's experts, read expert by expert, quantised ones as they are stored.

transformers holds a matrix of all experts as one tensor. Checkpoints have it so, or a matrix for
each expert, of which transformers' tables say how they are merged (`converted_files.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from .checkpoint import WeightFiles
from .converted_files import ConvertedFiles
from .quantized_files import KeptFiles, QuantizedFiles
from .quantized_layouts import QuantizedWeight

# [outputs, inputs]
ExpertPart = QuantizedWeight | Tensor


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """A matrix of all experts of a layer, in a checkpoint.

    name           of it in transformers' model
    shape          there
    is_transposed  whether that is [experts, inputs, outputs], not [experts, outputs, inputs]
    """

    files: WeightFiles
    name: str
    shape: torch.Size
    is_transposed: bool

    @classmethod
    def of(cls, files: WeightFiles, name: str, module: Any) -> StoredExperts:
        """That of the parameter `name` of a module of experts."""
        shape = getattr(module, name.rpartition(".")[2]).shape
        return cls(files, name, shape, getattr(module, "is_transposed", False))

    @property
    def expert_shape(self) -> torch.Size:
        """[outputs, inputs] of an expert."""
        return torch.Size(self.shape[:0:-1] if self.is_transposed else self.shape[1:])

    @property
    def is_quantized(self) -> bool:
        """Whether a part of it is stored quantised."""
        files, names = self.sources()
        if not isinstance(files, QuantizedFiles | KeptFiles):
            return False
        if isinstance(names, str):
            return names in files.experts
        return any(part in files.quantized for parts in names for part in parts)

    def __iter__(self) -> Iterator[Sequence[ExpertPart]]:
        """Of each expert the parts whose outputs lie side by side. Raises `CheckpointError`."""
        count = 0
        for count, parts in enumerate(self._by_expert(), start=1):  # noqa: B007 - for the check
            # Of parts that are no matrices, all sizes.
            shapes = [part.shape for part in parts]
            outputs, inputs = sum(shape[0] for shape in shapes), {shape[1:] for shape in shapes}
            wanted = self.expert_shape
            if (outputs, inputs) != (wanted[0], {wanted[1:]}):
                raise CheckpointError(
                    f"{self.files.folder}: matrices of {self.name} have shapes "
                    f"{' and '.join(str(tuple(shape)) for shape in shapes)}, the config says "
                    f"{tuple(wanted)}; config and weights do not belong together"
                )
            yield parts
        self._check_count([count])

    def _by_expert(self) -> Iterator[Sequence[ExpertPart]]:
        files, names = self.sources()
        if not isinstance(names, str):
            for parts in names:
                yield [_part(files, part) for part in parts]
        elif isinstance(files, QuantizedFiles | KeptFiles) and names in files.experts:
            yield from files.read_experts(names)
        else:
            [(_, whole)] = files.read([names])
            for one in whole:
                yield [one.t() if self.is_transposed and one.ndim == 2 else one]

    def sources(self) -> tuple[WeightFiles, str | list[tuple[str, ...]]]:
        """Where it is read: a tensor of all experts, or the names of each one's parts. Raises
        `CheckpointError` where some are missing."""
        if not isinstance(self.files, ConvertedFiles):
            return self.files, self.name
        stored = self.files.stored_name(self.name)
        if stored is not None:
            return self.files.files, stored
        by_part = self.files.stored_by_part(self.name)
        if by_part is None:
            return self.files, self.name
        self._check_count([len(part) for part in by_part])
        return self.files.files, list(zip(*by_part, strict=True))

    def _check_count(self, counts: Sequence[int]) -> None:
        if set(counts) != {self.shape[0]}:
            raise CheckpointError(
                f"{self.files.folder}: {self.name} is of {self.shape[0]} experts, and there are "
                f"matrices of {' and '.join(map(str, counts))}; fetch the checkpoint again"
            )


def _part(files: WeightFiles, name: str) -> ExpertPart:
    if isinstance(files, QuantizedFiles | KeptFiles) and name in files.quantized:
        return files.read_quantized(name)
    [(_, tensor)] = files.read([name])
    return tensor
