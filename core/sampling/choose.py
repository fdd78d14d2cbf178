"""The rule that edits logits and chooses a target token, in numpy.

`kernels/sampling/reference.py` has it in torch.

See docs/how-it-works.md, "Coupled sampling".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Float32, Int32, Int64
from ..request.allowed_tokens import unpack
from ..steps import LogitEdits, Penalties, SamplingRows
from .noise import gumbel_of, uniform

# More than the screening of `noisy_argmax` can err by.
SCREEN_MARGIN = 1e-4


def choose_tokens(logits: Float32, sampling: SamplingRows) -> Int32:
    """The target token of each row, int32 [rows]; `logits` is float32 [rows, vocabulary].

    argmax of `processed logits / temperature + gumbel(seed, position, token)`; at temperature 0
    the argmax of the logits. The lowest id wins a tie. Processors act in the order temperature,
    top_k, top_p, min_p, typical_p, each on the distribution that the former leaves.
    """
    chosen = logits.argmax(axis=-1).astype(np.int32)
    rows = np.flatnonzero(sampling.temperature)
    if len(rows):
        scaled = np.stack([process_logits(logits[row], sampling, int(row)) for row in rows])
        chosen[rows] = noisy_argmax(scaled, sampling.seed[rows], sampling.position[rows])
    return chosen


def process_logits(logits: Float32, sampling: SamplingRows, row: int) -> Float32:
    """Logits [vocabulary] over the temperature, with -inf for the tokens that cannot be chosen.

    top_k keeps all that tie with the k-th; top_p keeps the smallest set with at least that
    probability, lower ids first among equals; min_p keeps what is at least that probable in
    relation to the most probable token; typical_p keeps the tokens whose surprise is nearest to the
    entropy, up to that probability (Meister et al. 2023). `row` must have a temperature above 0.
    """
    # Relative to the best, so that no temperature, however small, makes infinities.
    scaled = (logits - logits.max()) / sampling.temperature[row]
    top_k, top_p, min_p = sampling.top_k[row], sampling.top_p[row], sampling.min_p[row]
    if 0 < top_k < len(scaled):
        scaled = np.where(scaled < np.partition(scaled, -top_k)[-top_k], -np.inf, scaled)
    if top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        weights = np.exp(scaled[order].astype(np.float64))
        above = np.cumsum(weights) - weights
        outside = above >= np.float64(top_p) * weights.sum()
        scaled[order[1:][outside[1:]]] = -np.inf
    if min_p > 0:
        scaled = np.where(scaled < np.log(np.float64(min_p)), -np.inf, scaled)
    if sampling.typical_p[row] < 1:
        scaled = _keep_typical(scaled.astype(np.float32), sampling.typical_p[row])
    return scaled.astype(np.float32)


def _keep_typical(scaled: Float32, typical_p: float) -> Float32:
    weights = np.exp(scaled.astype(np.float64))
    total = weights.sum()
    surprise = np.log(total) - scaled
    # 0 * inf is NaN, and what cannot be chosen adds nothing to the entropy.
    entropy = (weights * np.where(weights > 0, surprise, 0.0)).sum() / total
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    ranked = weights[order]
    outside = np.cumsum(ranked) - ranked >= np.float64(typical_p) * total
    kept = scaled.copy()
    kept[order[1:][outside[1:]]] = -np.inf
    # The most probable token may be gone; `noisy_argmax` wants the best at 0.
    return kept - kept.max()


def noisy_argmax(scaled: Float32, seeds: Int64, positions: Int64) -> Int64:
    """Argmax of each row of `scaled` [rows, vocabulary] plus its noise; best logit 0 in each row.

    The exact noise is computed for few tokens only. Screening takes the library's float64
    logarithm, accurate to 1e-11 here, as is the exact one. Noise lies in (-4, 37) and the best
    logit is 0, so that the winner's logit and sum are below 64 in size: rounding to float32 moves
    them by less than 1e-5. A token that is two margins below the best of the screen cannot win.
    """
    token_ids = np.arange(scaled.shape[-1])
    uniforms = uniform(seeds[:, None], positions[:, None], token_ids)
    screen = scaled - np.log(-np.log(uniforms))
    row, token = np.nonzero(screen >= screen.max(axis=-1, keepdims=True) - 2 * SCREEN_MARGIN)
    scores = np.full_like(scaled, -np.inf)
    scores[row, token] = scaled[row, token] + gumbel_of(uniforms[row, token])
    return scores.argmax(axis=-1)


def edit_logits(logits: Float32, edits: Sequence[LogitEdits]) -> Float32:
    """float32 [rows, vocabulary] with the edits made; without edits, `logits` itself.

    Bias, then penalties, then the mask, as vLLM does. Each operation is rounded to float32 on its
    own, so that torch gives the same bits.
    """
    if not edits:
        return logits
    edited = logits.copy()
    for edit in edits:
        rows = edited[edit.first_row : edit.first_row + edit.num_rows]
        rows[:, edit.bias_tokens] += edit.bias
        if edit.penalties is not None:
            tokens = edit.penalties.tokens
            rows[:, tokens] = _penalised(rows[:, tokens], edit.penalties)
        if edit.mask is not None:
            rows[np.broadcast_to(~unpack(edit.mask, rows.shape[1]), rows.shape)] = -np.inf
    return edited


def counts_of(penalties: Penalties, num_rows: int) -> Int32:
    """int32 [rows, u]: times that each token is in the answer or on the row's path."""
    counts = np.repeat(penalties.counts[None], num_rows, axis=0)
    np.add.at(counts, (penalties.path_rows, penalties.path_tokens), 1)
    return counts


def _penalised(logits: Float32, penalties: Penalties) -> Float32:
    """Logits [rows, u] of the tokens that penalties speak of."""
    counts = counts_of(penalties, len(logits))
    repetition = np.float32(penalties.repetition)
    weaker = np.where(logits > 0, logits / repetition, logits * repetition)
    changed = np.where((counts > 0) | penalties.in_prompt, weaker, logits)
    changed -= counts.astype(np.float32) * np.float32(penalties.frequency)
    changed -= (counts > 0).astype(np.float32) * np.float32(penalties.presence)
    return changed
