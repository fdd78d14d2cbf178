"""From logits to one token: the sampling noise, the choice of a token in numpy (as
`kernels/sampling/reference.py` has it in torch), and the sampling parameters of a step's rows.

The noise is a pure function of (seed, position, token id). Adding standard Gumbel noise to
log-probabilities and taking the argmax samples exactly from them (Gumbel-max). A token's choice
does not depend on what was drafted, on the batch or on the tree; and drafters that add the same
noise agree with the target more often.

Bits come from the SplitMix64 generator (Steele, Lea, Flood 2014) keyed by seed and position, with
the token id as counter. The logarithm is computed from additions, multiplications, divisions and
bit operations only, each of which IEEE 754 rounds the same way everywhere, so that numpy, torch
and Triton (without fused multiply-add) give the same float32 noise bit by bit.
Formula: docs/how-it-works.md, "Coupled sampling".
`kernels/sampling/reference.py` is the same in torch, `kernels/sampling/noise_kernels.py` in
Triton; change all together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .arrays import Float32, Float64, Int32, Int64, UInt32, UInt64
from .compiled import compiled
from .proposals import LogitsParams
from .request.allowed_tokens import unpack
from .request.request import RequestState, TokenCounts
from .steps import LogitEdits, Penalties, SamplingRows
from .tree.tree import PARENT, TokenTree

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

LN2 = math.log(2.0)
# 2 * atanh(s) = 2 * (s + s^3/3 + s^5/5 + ...); |s| <= 0.1716 leaves an error below 1e-13.
ATANH_TERMS = tuple(2.0 / power for power in (15, 13, 11, 9, 7, 5, 3, 1))


def mix64(x: UInt64) -> UInt64:
    """SplitMix64's finaliser: a bijection of 64-bit words whose output bits look independent."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def stream_keys(seeds: Int64, positions: Int64) -> UInt64:
    """One 64-bit key for each (seed, position) pair; arrays of equal shape."""
    gamma = np.uint64(GAMMA)
    by_seed = mix64(seeds.astype(np.uint64) + gamma)
    return mix64(by_seed ^ mix64(positions.astype(np.uint64) * gamma + gamma))


def exact_log(x: Float64) -> Float64:
    """Natural logarithm of positive normal float64 by exactly rounded operations only."""
    bits = x.view(np.int64)
    # Shift the mantissa into [sqrt(1/2), sqrt(2)) by subtracting the bits of sqrt(1/2).
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
    mantissa = (bits - (exponent << 52)).view(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, ATANH_TERMS[0])
    for term in ATANH_TERMS[1:]:
        series = series * square + term
    return exponent.astype(np.float64) * LN2 + series * s


def uniform(seeds: Int64, positions: Int64, token_ids: Int64) -> Float64:
    """The uniforms on the open interval (0, 1) that `gumbel` is made of; the same arguments."""
    seeds, positions = np.broadcast_arrays(seeds, positions)
    keys = stream_keys(seeds, positions)
    bits = mix64(keys + token_ids.astype(np.uint64) * np.uint64(GAMMA))
    # 52 bits and a half: exact in float64.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel_of(uniforms: Float64) -> Float32:
    """Standard Gumbel noise of uniforms."""
    return (-exact_log(-exact_log(uniforms))).astype(np.float32)


def gumbel(seeds: Int64, positions: Int64, token_ids: Int64) -> Float32:
    """Standard Gumbel noise, float32; `seeds`, `positions` and `token_ids` broadcast together.

    For a whole vocabulary pass seeds and positions as [rows, 1] and `np.arange(vocab_size)`.
    """
    return gumbel_of(uniform(seeds, positions, token_ids))


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


def noisy_argmax(
    scaled: Float32, seeds: Int64, positions: Int64, token_ids: Int64 | None = None
) -> Int64:
    """Argmax of each row of `scaled` [rows, vocabulary] plus its noise; best logit 0 in each row.

    `token_ids` [vocabulary]: those of the columns, where they are others.

    The exact noise is computed for few tokens only. Screening takes the library's float64
    logarithm, accurate to 1e-11 here, as is the exact one. Noise lies in (-4, 37) and the best
    logit is 0, so that the winner's logit and sum are below 64 in size: rounding to float32 moves
    them by less than 1e-5. A token that is two margins below the best of the screen cannot win.
    """
    ids = np.arange(scaled.shape[-1]) if token_ids is None else token_ids
    uniforms = uniform(seeds[:, None], positions[:, None], ids)
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


# ---- the sampling parameters and changed logits of a step's rows


def penalties_of(params: LogitsParams, counts: TokenCounts, tree: TokenTree) -> Penalties:
    """The penalties of the rows after the root and after each node.

    Tokens that only stand in the tree count where they are on a row's path.
    """
    tokens, times, indices = counts.beside(tree.tokens.tolist())
    rows, nodes = path_entries(tree.nodes)
    in_prompt = np.zeros(len(tokens), dtype=np.bool_)
    in_prompt[: counts.num_in_prompt] = True
    return Penalties(
        tokens=tokens,
        counts=times,
        in_prompt=in_prompt,
        path_rows=rows,
        path_tokens=indices[nodes],
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )


@compiled
def path_entries(nodes: Int32) -> tuple[Int32, Int32]:
    """For every node of a tree, its row and each node from it up to the root, two int32 [entries].

    `nodes` as in `TokenTree`.
    """
    depths = np.zeros(len(nodes), dtype=np.int64)
    for node in range(len(nodes)):
        parent = nodes[node, PARENT]
        depths[node] = 1 + (depths[parent] if parent >= 0 else 0)
    rows = np.empty(depths.sum(), dtype=np.int32)
    entries = np.empty(len(rows), dtype=np.int32)
    done = 0
    for node in range(len(nodes)):
        above = node
        while above >= 0:
            rows[done], entries[done] = node + 1, above
            above = nodes[above, PARENT]
            done += 1
    return rows, entries


NO_IDS = np.empty(0, dtype=np.int32)
NO_BIAS = np.empty(0, dtype=np.float32)


def sampling_rows(
    temperatures: Sequence[float],
    shapings: Sequence[LogitsParams],
    seeds: Sequence[int],
    positions: Int64,
    counts: Sequence[int] | Int32 | None = None,
) -> SamplingRows:
    """Rows of some requests, `counts` of each; by default one. `positions` is int64 [rows]."""
    floats = np.array([temperatures, *_columns(shapings)], dtype=np.float32)
    whole = np.array([[logits_params.top_k for logits_params in shapings], seeds], dtype=np.int64)
    if counts is not None:
        floats, whole = floats.repeat(counts, axis=1), whole.repeat(counts, axis=1)
    return _rows(floats, whole, positions)


def rows_of_requests(
    states: Sequence[RequestState], positions: Int64, counts: Int32
) -> SamplingRows:
    """`sampling_rows` of requests by their own parameters."""
    floats = np.frombuffer(b"".join([state.packed.floats for state in states]), dtype=np.float32)
    whole = np.frombuffer(b"".join([state.packed.ints for state in states]), dtype=np.int64)
    floats, whole = floats.reshape(-1, 4).T, whole.reshape(-1, 2).T
    return _rows(floats.repeat(counts, axis=1), whole.repeat(counts, axis=1), positions)


def _rows(floats: Float32, whole: Int64, positions: Int64) -> SamplingRows:
    return SamplingRows(
        temperature=floats[0],
        top_k=whole[0].astype(np.int32),
        top_p=floats[1],
        min_p=floats[2],
        typical_p=floats[3],
        seed=whole[1],
        position=positions,
    )


def _columns(shapings: Sequence[LogitsParams]) -> list[list[float]]:
    return [
        [logits_params.top_p for logits_params in shapings],
        [logits_params.min_p for logits_params in shapings],
        [logits_params.typical_p for logits_params in shapings],
    ]


def build_edits(
    state: RequestState, tree: TokenTree, first_row: int, grammar_masks: UInt32 | None = None
) -> LogitEdits | None:
    """Edits of the rows after the root and after each node, the first of which is `first_row`.

    `grammar_masks` uint32 [1 + nodes, words]: the tokens that the request's grammar allows there.

    Every row is changed by the text that it follows, its own path included, so that a token's
    choice does not depend on what was drafted beside it. None: nothing is changed.
    """
    params, permitted = state.request.params, state.request.allowed_tokens
    mask = None
    if permitted is not None:
        answered = state.last_answered(permitted.lookback)
        mask = permitted.masks(tree, state.num_answered, answered, grammar_masks)
    return edits_of(params, state.token_counts, mask, tree, first_row)


def edits_of(
    logits_params: LogitsParams,
    counts: TokenCounts | None,
    mask: UInt32 | None,
    tree: TokenTree,
    first_row: int,
) -> LogitEdits | None:
    """The same for any text: `counts` of its tokens (None: no penalties), `mask` of the rows."""
    if mask is None and not logits_params.logit_bias and counts is None:
        return None
    bias = logits_params.logit_bias
    return LogitEdits(
        first_row=first_row,
        num_rows=1 + len(tree),
        bias_tokens=np.array([*bias], dtype=np.int32) if bias else NO_IDS,
        bias=np.array([*bias.values()], dtype=np.float32) if bias else NO_BIAS,
        penalties=None if counts is None else penalties_of(logits_params, counts, tree),
        mask=mask,
    )
