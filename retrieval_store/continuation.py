"""Grows the most probable subtree below a matched context, best first.

A node is seen through several views: one for every segment and context length. With level 0 the
longest context and level 1 the shorter one that was seen more often, n tokens from the start of a
level's context to the node, and prior = PRIOR / n of that level,

    P_1(token | path) = count_1(path + token) / (count_1(path) + prior_1)
    P(token | path)   = (count_0(path + token) + prior_0 * BACK_OFF * P_1)
                        / (count_0(path) + prior_0)

and P = BACK_OFF * P_1 where level 0 has nothing left. So a level's weight falls with its count, as
in Dirichlet smoothing (MacKay and Peto 1995), and what is missing to 1 stands for "something never
seen here": one occurrence is never taken for certain, and the less so the shorter the match. On
held-out files of the standard library (4.8 M tokens stored) a single occurrence was right 18 % of
the time after 2 matching tokens, 39 % after 5 and 56 % after 8, which is what PRIOR = 8 says.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from ..core.lookup import Subtree
from ..core.types import ROOT, Float64, Int64
from .segment import MAX_CONTINUATION
from .suffix_search import Span, SuffixSearch

PRIOR = 8.0
BACK_OFF = 0.5
WIDE_SPAN = 64

# Reader of a segment, level of the context, tokens from the context's start to the node, its span.
View = tuple[SuffixSearch, int, int, Span]
# Probability given the parent, token, views.
Child = tuple[float, int, list[View]]


def most_probable_subtree(views: list[View], budget: int, *, match_len: int) -> Subtree:
    """The `budget` continuations of highest path probability below the node of `views`."""
    tokens: list[int] = []
    parents: list[int] = []
    log_probs: list[float] = []
    # Entries: minus the path's log-probability, order of discovery, then what the node needs.
    frontier: list[tuple[float, int, int, int, float, int, list[View]]] = []
    discovered = 0
    node, path, depth = ROOT, 0.0, 0
    while True:
        if depth < MAX_CONTINUATION:
            for prob, token, below in _children(views, budget - len(tokens)):
                log_prob = math.log(prob)
                entry = (path - log_prob, discovered, node, token, log_prob, depth + 1, below)
                heapq.heappush(frontier, entry)
                discovered += 1
        if not frontier or len(tokens) == budget:
            break
        path, _, parent, token, log_prob, depth, views = heapq.heappop(frontier)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        log_probs.append(log_prob)
    return Subtree(
        np.array(tokens, dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.array(log_probs, dtype=np.float32),
        match_len,
    )


def _children(views: list[View], most: int) -> list[Child]:
    """The `most` most probable children of a node, best first, equal ones by token."""
    if most == 0:
        return []
    counts, depths = [0, 0], [1, 1]
    for _, level, depth, (low, high) in views:
        counts[level] += high - low
        depths[level] = depth
    prior_0, prior_1 = PRIOR / depths[0], PRIOR / depths[1]
    scale_0 = 1.0 / (counts[0] + prior_0)
    fallback = BACK_OFF * (prior_0 * scale_0 if counts[0] else 1.0)
    weights = (scale_0, fallback / (counts[1] + prior_1))
    if sum(counts) > WIDE_SPAN:
        return _wide_children(views, weights, most)
    return _narrow_children(views, weights, most)


def _narrow_children(views: list[View], weights: tuple[float, float], most: int) -> list[Child]:
    probs: dict[int, float] = {}
    below: dict[int, list[View]] = {}
    for search, level, depth, span in views:
        weight = weights[level]
        for token, low, high in search.children(span, depth):
            view = (search, level, depth + 1, (low, high))
            if token in probs:
                probs[token] += weight * (high - low)
                below[token].append(view)
            else:
                probs[token] = weight * (high - low)
                below[token] = [view]
    ranked = sorted(probs, key=lambda token: (-probs[token], token))
    return [(probs[token], token, below[token]) for token in ranked[:most]]


def _wide_children(views: list[View], weights: tuple[float, float], most: int) -> list[Child]:
    found = [search.child_arrays(span, depth) for search, _, depth, span in views]
    shares: list[Float64] = [
        np.multiply(highs - lows, weights[view[1]], dtype=np.float64)
        for view, (_, lows, highs) in zip(views, found, strict=True)
    ]
    tokens, probs = _summed([entry[0] for entry in found], shares)
    order = np.lexsort((tokens, -probs))[:most]
    best = tokens[order]
    below: list[list[View]] = [[] for _ in best]
    for (search, level, depth, _), (listed, lows, highs) in zip(views, found, strict=True):
        places = np.searchsorted(listed, best)
        held = np.flatnonzero(np.append(listed, -1)[places] == best)
        for rank, place in zip(held.tolist(), places[held].tolist(), strict=True):
            below[rank].append((search, level, depth + 1, (int(lows[place]), int(highs[place]))))
    return list(zip(probs[order].tolist(), best.tolist(), below, strict=True))


def _summed(tokens: list[Int64], shares: list[Float64]) -> tuple[Int64, Float64]:
    """The distinct tokens, ascending, with the sum of their shares; each list is ascending."""
    if len(tokens) == 1:
        return tokens[0], shares[0]
    distinct, slots = np.unique(np.concatenate(tokens), return_inverse=True)
    sums = np.zeros(len(distinct))
    np.add.at(sums, slots, np.concatenate(shares))
    return distinct, sums
