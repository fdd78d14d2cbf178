"""Chooses the target's token of each row: an argmax over processed logits plus noise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..core.types import SamplingRows
from .noise import gumbel_of, uniform

# More than screening can err by (see `_noisy_argmax`).
SCREEN_MARGIN = 1e-4


def choose_tokens(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """The target token of each row, int32 [rows], on the device of `logits` [rows, vocabulary].

    argmax of `processed logits / temperature + gumbel(seed, position, token)`; at temperature 0
    the argmax of the logits. The lowest id wins a tie. Processors act in the order temperature,
    top_k, top_p, min_p, each on the law that the former leaves. Equals `core.sampling`.
    """
    chosen = logits.argmax(dim=-1)
    sampled = np.flatnonzero(sampling.temperature)
    if len(sampled):
        rows = torch.from_numpy(sampled).to(logits.device)
        part = logits if len(sampled) == len(logits) else logits[rows]
        chosen[rows] = _sample(part.float(), sampling, sampled)
    return chosen.to(torch.int32)


def _sample(logits: Tensor, sampling: SamplingRows, rows: np.ndarray) -> Tensor:
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
    return _noisy_argmax(scaled, column(sampling.seed), column(sampling.position))


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


def _noisy_argmax(scaled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Argmax of `scaled` plus exact noise, with the exact noise of few tokens only.

    Screening takes torch's own float64 logarithms, accurate to 1e-11 here as is the exact one.
    Noise lies in (-4, 37) and the best logit is 0, so that the winner's logit and sum are below
    64 in size: rounding to float32 moves them by less than 1e-5. A token that is two margins
    below the best of the screen therefore cannot win.
    """
    token_ids = torch.arange(scaled.shape[-1], device=scaled.device)
    uniforms = uniform(seeds, positions, token_ids)
    screen = scaled - torch.log(-torch.log(uniforms))
    best = screen.amax(dim=-1, keepdim=True)
    row, token = torch.nonzero(screen >= best - 2 * SCREEN_MARGIN, as_tuple=True)
    exact = scaled[row, token] + gumbel_of(uniforms[row, token])
    scores = torch.full_like(scaled, -torch.inf)
    scores[row, token] = exact
    return scores.argmax(dim=-1)
