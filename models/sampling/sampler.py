"""Chooses the target's token of each row: an argmax over processed logits plus noise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...core.sampling import choose as reference
from ...core.steps import SamplingRows
from ...kernels.sampling.reference import keep_top, keep_typical, noisy_argmax, shifted, stream_keys


def choose_tokens(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """The target token of each row, int32 [rows], on the device of `logits` [rows, vocabulary].

    argmax of `processed logits / temperature + gumbel(seed, position, token)`; at temperature 0
    the argmax of the logits. The lowest id wins a tie. Processors act in the order temperature,
    top_k, top_p, min_p, typical_p, each on the distribution that the former leaves. Gives the
    tokens of `core/sampling/choose.py`.
    """
    chosen = _argmax(logits)
    sampled = np.flatnonzero(sampling.temperature)
    if len(sampled):
        rows = torch.from_numpy(sampled).to(logits.device)
        part = logits if len(sampled) == len(logits) else logits[rows]
        scaled = process_rows(part.float(), sampling, sampled)
        columns = (
            torch.from_numpy(values[sampled]).to(logits.device)[:, None]
            for values in (sampling.seed, sampling.position)
        )
        chosen[rows] = _noisy_argmax(scaled, *columns)
    return chosen.to(torch.int32)


def _argmax(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":
        # numpy's is vectorised: ten times faster than torch's.
        return torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def process_rows(logits: Tensor, sampling: SamplingRows, rows: np.ndarray) -> Tensor:
    """Logits over the temperature, with -inf for the tokens that cannot be chosen.

    As `core.sampling.choose.process_logits`; `logits` are those of `rows`, all of which have a
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
        # numpy multiplies 64-bit words several times faster than torch.
        parts = (scaled.numpy(), seeds[:, 0].numpy(), positions[:, 0].numpy())
        return torch.from_numpy(reference.noisy_argmax(*parts))
    return noisy_argmax(scaled, stream_keys(seeds, positions))
