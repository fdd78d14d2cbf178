"""Edits a stage's logits and chooses tokens: in torch, or by the kernels chosen at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..core import sampling as reference
from ..core.steps import LogitEdits, SamplingRows
from ..kernels.cpu.build import are_loaded
from ..kernels.dispatch import Machine
from ..kernels.elementwise.dispatch import load_elementwise
from ..kernels.recent_tables import RecentTables
from ..kernels.sampling.dispatch import choose_sampling, load_sampling, takes
from ..kernels.sampling.edit_tables import EditCapacity, EditTables
from ..kernels.sampling.reference import (
    edit_logits,
    keep_top,
    keep_typical,
    noisy_argmax,
    shifted,
    stream_keys,
)
from ..kernels.sampling.tables import SamplingScratch, SamplingTables


def choose_tokens(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """The target token of each row, int32 [rows], on the device of `logits` [rows, vocabulary].

    -1 after a row that has NaN, infinity, or minus infinity alone.

    argmax of `processed logits / temperature + gumbel(seed, position, token)`; at temperature 0
    the argmax of the logits. The lowest id wins a tie. Processors act in the order temperature,
    top_k, top_p, min_p, typical_p, each on the distribution that the former leaves. Gives the
    tokens of `core/sampling.py`.
    """
    chosen = _best(logits)
    if sampling.temperature.any():
        sampled = np.flatnonzero(sampling.temperature)
        rows = torch.from_numpy(sampled).to(logits.device)
        part = logits if len(sampled) == len(logits) else logits[rows]
        part, is_bad = part.float(), chosen[rows] < 0
        if part.device.type != "cpu" or is_bad.any():
            # Filters count what they keep: of NaN nothing.
            part = part.masked_fill(is_bad[:, None], 0.0)
        scaled = process_rows(part, sampling, sampled)
        columns = (
            torch.from_numpy(values[sampled]).to(logits.device)[:, None]
            for values in (sampling.seed, sampling.position)
        )
        tokens = _noisy_argmax(scaled, *columns).to(torch.int32)
        chosen[rows] = tokens.masked_fill(is_bad, -1)
    return chosen


def _best(logits: Tensor) -> Tensor:
    """The best token of each row, int32 [rows]; -1 where its logit is no finite number.

    Both libraries treat NaN as the maximum, so that only the best logit needs a check.
    """
    if logits.device.type == "cpu":
        # numpy's is vectorised: ten times faster than torch's.
        values = logits.float().numpy()
        best = values.argmax(axis=-1)
        is_finite = np.isfinite(values[np.arange(len(values)), best])
        if not is_finite.all():
            best[~is_finite] = -1
        return torch.from_numpy(best.astype(np.int32))
    most, best = logits.max(dim=-1)
    return best.to(torch.int32).masked_fill_(~most.isfinite(), -1)


def process_rows(logits: Tensor, sampling: SamplingRows, rows: np.ndarray) -> Tensor:
    """Logits over the temperature, with -inf for the tokens that cannot be chosen.

    As `core.sampling.process_logits`; `logits` are those of `rows`, all of which have a
    temperature above 0.
    """
    device = logits.device

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[rows]).to(device)[:, None]

    scaled = shifted(logits, column(sampling.temperature))
    if sampling.top_k[rows].any() or (sampling.top_p[rows] < 1).any():
        scaled = keep_top(scaled, column(sampling.top_k), column(sampling.top_p))
    if sampling.min_p[rows].any():
        with np.errstate(divide="ignore"):
            floor = np.log(sampling.min_p.astype(np.float64))
        scaled = scaled.masked_fill(scaled < column(floor), -torch.inf)
    if (sampling.typical_p[rows] < 1).any():
        scaled = keep_typical(scaled, column(sampling.typical_p))
    return scaled


def _noisy_argmax(scaled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    if scaled.device.type == "cpu":
        if are_loaded():
            return torch.ops.draftline.noisy_argmax(scaled.contiguous(), seeds, positions)
        # numpy multiplies 64-bit words several times faster than torch.
        parts = (scaled.numpy(), seeds[:, 0].numpy(), positions[:, 0].numpy())
        return torch.from_numpy(reference.noisy_argmax(*parts))
    return noisy_argmax(scaled, stream_keys(seeds, positions))


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


class TorchSampler:
    """Plain torch: the reference, and the implementation on CPUs."""

    def edit(self, logits: Tensor, edits: Sequence[LogitEdits]) -> Tensor:
        """float32 logits [rows, vocabulary] with the edits made; without edits, `logits` itself."""
        return edit_logits(logits, edits)

    def choose(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """The target token of each row, int32 [rows] on the device."""
        return choose_tokens(logits, sampling)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """float32 log-probabilities [rows, vocabulary]."""
        return torch.log_softmax(logits, dim=-1)


class KernelSampler:
    """Triton kernels; caches the tables of the last step sizes, and one scratch buffer."""

    def __init__(self) -> None:
        self._ops = load_sampling()
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
        self._ops.edit_logits(logits, tables, out)
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
        self._ops.choose_tokens(logits, tables, scratch, out)
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


def choose_sampler(device: torch.device) -> Sampler:
    """The sampler of a stage on `device`."""
    return KernelSampler() if choose_sampling(Machine.of(device)) == "triton" else TorchSampler()
