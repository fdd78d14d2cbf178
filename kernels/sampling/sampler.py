"""Edits a stage's logits and chooses tokens: in torch, or by the kernels; chosen at load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...core.steps import LogitEdits, SamplingRows
from ..device_tables import RecentTables
from ..dispatch import Machine, load_elementwise, runs_triton
from .edit_tables import EditCapacity, EditTables
from .reference import TorchSampler, choose_tokens
from .tables import SamplingScratch, SamplingTables


class Sampler(Protocol):
    """Edits logits [rows, vocabulary] on the stage's device, and chooses a token for each row."""

    def edit(self, logits: Tensor, edits: Sequence[LogitEdits]) -> Tensor:
        """float32 logits with the edits made; without edits, `logits` itself."""
        ...

    def choose(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """The target token of each row, int32 [rows] on the device: `core/sampling.py`.

        -1 after a row that has NaN, infinity, or minus infinity alone.
        """
        ...

    def log_softmax(self, logits: Tensor) -> Tensor:
        """float32 log-probabilities [rows, vocabulary]."""
        ...


class KernelSampler:
    """Triton kernels; caches the tables of the last step sizes, and one scratch buffer."""

    def __init__(self) -> None:
        # Triton is imported only where it is used.
        from .choose import choose_tokens, store_noise  # noqa: PLC0415
        from .edit_kernels import edit_logits  # noqa: PLC0415

        self._choose_tokens, self._edit_logits = choose_tokens, edit_logits
        self._store_noise = store_noise
        self._log_softmax = load_elementwise("triton").log_softmax
        self._tables: RecentTables[tuple[int, int], SamplingTables] = RecentTables()
        self._edits: RecentTables[tuple[EditCapacity, int], EditTables] = RecentTables()
        self._scratch: tuple[tuple[int, int], SamplingScratch] | None = None

    def edit(self, logits: Tensor, edits: Sequence[LogitEdits]) -> Tensor:
        """float32 logits [rows, vocabulary] with the edits made; without edits, `logits` itself."""
        if not edits:
            return logits
        num_rows, vocab_size = logits.shape
        key = EditCapacity.of(edits, num_rows), vocab_size
        tables = self._edits.get(key, lambda: EditTables(*key, logits.device))
        tables.refill(edits)
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        self._edit_logits(logits, tables, out)
        return out

    def choose(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """The target token of each row, int32 [rows] on the device."""
        if not takes(sampling):
            return choose_tokens(logits, sampling)
        num_rows, vocab_size = logits.shape
        key = 1 << max(num_rows - 1, 0).bit_length(), vocab_size
        tables = self._tables.get(key, lambda: SamplingTables(*key, logits.device))
        tables.refill(sampling)
        out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        scratch = self._scratch_of(*key, logits.device)
        self._choose_tokens(logits, tables, scratch, out)
        return out

    def choose_by(self, logits: Tensor, tables: SamplingTables) -> Tensor:
        """As `choose`, by tables that the caller fills. It may be captured: its buffers are made
        anew, and the host looks at nothing but what tables say of all their rows.
        """
        out = torch.empty(tables.num_rows, dtype=torch.int32, device=logits.device)
        scratch = SamplingScratch(tables.num_rows, tables.vocab_size, logits.device)
        self._choose_tokens(logits, tables, scratch, out)
        return out

    def noise(self, token_ids: Tensor, tables: SamplingTables) -> Tensor:
        """float32 [rows, n]: that of some tokens of each row, int64 [rows, n]."""
        out = torch.empty(token_ids.shape, dtype=torch.float32, device=token_ids.device)
        self._store_noise(token_ids.contiguous(), tables, out)
        return out

    def log_softmax(self, logits: Tensor) -> Tensor:
        """float32 log-probabilities [rows, vocabulary]; a row's do not depend on the others."""
        out = torch.empty_like(logits)
        self._log_softmax(logits, out)
        return out

    def _scratch_of(self, num_rows: int, vocab_size: int, device: torch.device) -> SamplingScratch:
        """Buffers for at least this many rows, which grow with the largest step so far."""
        if self._scratch is not None:
            (most, known), scratch = self._scratch
            if most >= num_rows and known == vocab_size:
                return scratch
        scratch = SamplingScratch(num_rows, vocab_size, device)
        self._scratch = (num_rows, vocab_size), scratch
        return scratch


def takes(sampling: SamplingRows) -> bool:
    """Whether the kernels can choose the tokens of these rows.

    They do not support typical_p, which orders tokens by their surprise, where bins of values do
    not help. torch chooses for all rows of such a step.
    """
    return bool((sampling.typical_p == 1).all())


def choose_sampler(device: torch.device) -> Sampler:
    """The sampler of a stage on `device`."""
    return KernelSampler() if runs_triton(Machine.of(device)) else TorchSampler()
