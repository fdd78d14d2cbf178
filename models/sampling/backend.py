"""The implementation that edits a stage's logits and chooses tokens, chosen at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...core.steps import LogitEdits, SamplingRows
from ...kernels.dispatch import Machine
from ...kernels.sampling.dispatch import choose_sampling, load_sampling, takes
from ...kernels.sampling.edit_reference import edit_logits
from ...kernels.sampling.edit_tables import EditCapacity, EditTables
from ...kernels.sampling.tables import SamplingScratch, SamplingTables
from .sampler import choose_tokens


class Sampler(Protocol):
    """Edits logits [rows, vocabulary] on the stage's device, and chooses a token for each row."""

    def edit(self, logits: Tensor, edits: Sequence[LogitEdits]) -> Tensor:
        """float32 logits with the edits made; without edits, `logits` itself."""
        ...

    def choose(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """The target token of each row, int32 [rows] on the device: `core/sampling/choose.py`."""
        ...


class TorchSampler:
    """Plain torch: the reference, and what runs on CPUs."""

    def edit(self, logits: Tensor, edits: Sequence[LogitEdits]) -> Tensor:
        """float32 logits [rows, vocabulary] with the edits made; without edits, `logits` itself."""
        return edit_logits(logits, edits)

    def choose(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """The target token of each row, int32 [rows] on the device."""
        return choose_tokens(logits, sampling)


class KernelSampler:
    """Triton kernels; keeps the tables of each size of steps, and one scratch for all."""

    def __init__(self) -> None:
        self._ops = load_sampling()
        self._tables: dict[tuple[int, int], SamplingTables] = {}
        self._edits: dict[tuple[EditCapacity, int], EditTables] = {}
        self._scratch: tuple[tuple[int, int], SamplingScratch] | None = None

    def edit(self, logits: Tensor, edits: Sequence[LogitEdits]) -> Tensor:
        """float32 logits [rows, vocabulary] with the edits made; without edits, `logits` itself."""
        if not edits:
            return logits
        num_rows, vocab_size = logits.shape
        key = EditCapacity.of(edits, num_rows), vocab_size
        if key not in self._edits:
            self._edits[key] = EditTables(*key, logits.device)
        self._edits[key].refill(edits)
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        self._ops.edit_logits(logits, self._edits[key], out)
        return out

    def choose(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """The target token of each row, int32 [rows] on the device."""
        if not takes(sampling):
            return choose_tokens(logits, sampling)
        num_rows, vocab_size = logits.shape
        key = 1 << max(num_rows - 1, 0).bit_length(), vocab_size
        if key not in self._tables:
            self._tables[key] = SamplingTables(*key, logits.device)
        self._tables[key].refill(sampling)
        out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        scratch = self._scratch_of(*key, logits.device)
        self._ops.choose_tokens(logits, self._tables[key], scratch, out)
        return out

    def _scratch_of(self, num_rows: int, vocab_size: int, device: torch.device) -> SamplingScratch:
        """Buffers for at least so many rows, which grow with the largest step seen."""
        if self._scratch is not None:
            (most, known), scratch = self._scratch
            if most >= num_rows and known == vocab_size:
                return scratch
        scratch = SamplingScratch(num_rows, vocab_size, device)
        self._scratch = (num_rows, vocab_size), scratch
        return scratch


def uses_fused_modules(device: str | torch.device, attention: str) -> bool:
    """Whether a stage on `device` has the modules of `models/layers/fused_modules.py`.

    `attention` is the stage's setting; `sdpa` asks for transformers' own modules.
    """
    return choose_sampling(Machine.of(device)) == "triton" and attention != "sdpa"


def choose_sampler(device: torch.device) -> Sampler:
    """The sampler of a stage on `device`."""
    return KernelSampler() if choose_sampling(Machine.of(device)) == "triton" else TorchSampler()
