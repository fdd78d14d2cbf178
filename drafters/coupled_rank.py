"""Ranks a drafter's nodes by its own distribution together with the request's sampling noise.

The target's token at a position is argmax(log p / T + noise), and a drafter knows the noise
(`core/sampling.py`). So it ranks siblings by s = log q / T + noise. If the target's scores
differ from the drafter's by independent standard Gumbel errors, child i is the target's token with
probability softmax(s)_i; times the mass that the listed siblings hold together, since the target
may choose an unlisted token. Without noise (T = 0) this is q itself. See
docs/drafters.md, "Coupled ranking".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.arrays import ROOT, Float32, Float64, Int32, Int64
from ..core.sampling import gumbel


@dataclass(frozen=True, slots=True)
class CoupledChoice:
    """How the token at a position is chosen.

    seed           of the request's noise
    next_position  absolute position of the token below the root
    """

    temperature: float
    seed: int
    next_position: int


def coupled_scores(
    log_probs: Float32, token_ids: Int32, depths: Int32, choice: CoupledChoice
) -> Float64:
    """log q / T + noise of each token; `depths` is 0 for children of the root. Arrays [..., n]."""
    scores = log_probs.astype(np.float64)
    if choice.temperature == 0:
        return scores
    seeds = np.full(1, choice.seed, dtype=np.int64)
    positions = depths.astype(np.int64) + choice.next_position
    noise = gumbel(seeds, positions, token_ids.astype(np.int64))
    return scores / choice.temperature + noise


def rank_coupled(
    tokens: Int32, parents: Int32, log_probs: Float32, choice: CoupledChoice, max_nodes: int
) -> tuple[Int32, Int32, Float32]:
    """The `max_nodes` nodes most likely to be on the target's path, best first.

    tokens, parents, log_probs: [n] as in `Proposal`, log_probs being log q of each node given its
    parent. Returns the same three arrays of the kept nodes, parents before children; their
    log_probs are conditional on the noise, at most 0.
    """
    if not len(tokens):
        return tokens, parents, log_probs
    given_noise = np.minimum(log_probs.astype(np.float64), 0.0)
    if choice.temperature > 0:
        scores = coupled_scores(log_probs, tokens, _depths(parents), choice)
        given_noise = _share_of_siblings(given_noise, scores, parents)
    # A path is never likelier than its prefix, so a stable sort keeps parents before children.
    kept = np.argsort(-_path_sums(given_noise, parents), kind="stable")[:max_nodes]
    new_index = np.full(len(tokens) + 1, ROOT, dtype=np.int32)
    new_index[kept] = np.arange(len(kept), dtype=np.int32)
    return tokens[kept], new_index[parents[kept]], given_noise[kept].astype(np.float32)


def rank_siblings(
    log_probs: Float32, ids: Int32, depths: Int32, choice: CoupledChoice, count: int
) -> tuple[Int64, Float32]:
    """`rank_coupled` of siblings, of any number of nodes, whose noise may be that of other ids, at
    positions of their own.

    log_probs, ids, depths: [..., n], as in `coupled_scores`. Returns the places of the `count` most
    likely ones, best first, and their log-probabilities given the noise, [..., count].
    """
    given = np.minimum(log_probs.astype(np.float64), 0.0)
    if choice.temperature > 0:
        scores = coupled_scores(log_probs, ids, depths, choice)
        given = np.minimum(_log_sum_exp(given) + scores - _log_sum_exp(scores), 0.0)
    kept = np.argsort(-given, axis=-1, kind="stable")[..., :count]
    return kept, np.take_along_axis(given, kept, axis=-1).astype(np.float32)


def _log_sum_exp(values: Float64) -> Float64:
    """[..., 1] of [..., n]."""
    highest = values.max(axis=-1, keepdims=True)
    return highest + np.log(np.exp(values - highest).sum(axis=-1, keepdims=True))


def _share_of_siblings(log_q: Float64, scores: Float64, parents: Int32) -> Float64:
    """log(sum of q over siblings) + log softmax of the scores over siblings, at most 0."""
    mass = _log_sum_exp_of_siblings(log_q, parents)
    return np.minimum(mass + scores - _log_sum_exp_of_siblings(scores, parents), 0.0)


def _log_sum_exp_of_siblings(values: Float64, parents: Int32) -> Float64:
    """For each node, log of the sum of exp(values) over the nodes with its parent."""
    highest = np.full(len(values) + 1, -np.inf)
    np.maximum.at(highest, parents, values)
    sums = np.bincount(
        parents + 1, weights=np.exp(values - highest[parents]), minlength=len(values) + 1
    )
    return highest[parents] + np.log(sums[parents + 1])


def _depths(parents: Int32) -> Int32:
    depths: list[int] = []
    for parent in parents.tolist():
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return np.array(depths, dtype=np.int32)


def _path_sums(values: Float64, parents: Int32) -> Float64:
    sums = values.tolist()
    for node, parent in enumerate(parents.tolist()):
        if parent != ROOT:
            sums[node] += sums[parent]
    return np.array(sums)
