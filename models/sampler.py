"""Chooses the target's token of each row: an argmax over processed logits plus noise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..core.sampling import SCREEN_MARGIN, noisy_argmax
from ..core.types import SamplingRows
from .noise import gumbel_of, uniform


def choose_tokens(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """The target token of each row, int32 [rows], on the device of `logits` [rows, vocabulary].

    argmax of `processed logits / temperature + gumbel(seed, position, token)`; at temperature 0
    the argmax of the logits. The lowest id wins a tie. Processors act in the order temperature,
    top_k, top_p, min_p, typical_p, each on the law that the former leaves. Equals `core.sampling`.
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

    As `core.sampling.process_logits`; `logits` are those of `rows`, all of a temperature above 0.
    """
    device = logits.device

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[rows]).to(device)[:, None]

    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / column(sampling.temperature)
    if sampling.top_k[rows].any() or (sampling.top_p[rows] < 1).any():
        scaled = _keep_top(scaled, column(sampling.top_k), column(sampling.top_p))
    if sampling.min_p[rows].any():
        with np.errstate(divide="ignore"):
            floor = np.log(sampling.min_p.astype(np.float64))
        scaled = scaled.masked_fill(scaled < column(floor), -torch.inf)
    if (sampling.typical_p[rows] < 1).any():
        scaled = _keep_typical(scaled, column(sampling.typical_p))
    return scaled


def _keep_top(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits outside top_k or top_p become -inf. Ties are kept by top_k, and cut by id by top_p."""
    order = scaled.argsort(dim=-1, descending=True, stable=True)
    ranked = scaled.gather(-1, order)
    vocab_size = scaled.shape[-1]
    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long() - 1
    ranked = ranked.masked_fill(ranked < ranked.gather(-1, last), -torch.inf)
    weights = torch.exp(ranked.double())
    above = weights.cumsum(dim=-1) - weights
    outside = (above >= top_p.double() * weights.sum(dim=-1, keepdim=True)) & (top_p < 1)
    outside[:, 0] = False
    ranked = ranked.masked_fill(outside, -torch.inf)
    return torch.empty_like(scaled).scatter_(-1, order, ranked)


def _keep_typical(scaled: Tensor, typical_p: Tensor) -> Tensor:
    """As `core.sampling`; rows with a typical_p of 1 stay as they are."""
    weights = torch.exp(scaled.double())
    total = weights.sum(dim=-1, keepdim=True)
    surprise = torch.log(total) - scaled
    terms = weights * surprise.masked_fill(weights == 0, 0.0)
    entropy = terms.sum(dim=-1, keepdim=True) / total
    order = (surprise - entropy).abs().argsort(dim=-1, stable=True)
    ranked = weights.gather(-1, order)
    outside = ranked.cumsum(dim=-1) - ranked >= typical_p.double() * total
    outside[:, 0] = False
    dropped = torch.zeros_like(outside).scatter_(-1, order, outside) & (typical_p < 1)
    kept = scaled.masked_fill(dropped, -torch.inf)
    return kept - kept.amax(dim=-1, keepdim=True)


def _noisy_argmax(scaled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    if scaled.device.type == "cpu":
        # numpy multiplies 64-bit words several times faster than torch.
        parts = (scaled.numpy(), seeds[:, 0].numpy(), positions[:, 0].numpy())
        return torch.from_numpy(noisy_argmax(*parts))
    return noisy_argmax_on_device(scaled, seeds, positions)


def noisy_argmax_on_device(scaled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """As `core.sampling.noisy_argmax`, which says why it is exact; seeds, positions [rows, 1]."""
    token_ids = torch.arange(scaled.shape[-1], device=scaled.device)
    uniforms = uniform(seeds, positions, token_ids)
    screen = scaled - torch.log(-torch.log(uniforms))
    best = screen.amax(dim=-1, keepdim=True)
    row, token = torch.nonzero(screen >= best - 2 * SCREEN_MARGIN, as_tuple=True)
    scores = torch.full_like(scaled, -torch.inf)
    scores[row, token] = scaled[row, token] + gumbel_of(uniforms[row, token])
    return scores.argmax(dim=-1)
