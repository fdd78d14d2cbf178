"""The sampling parameters, penalties and other changes of logits for the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Float32, Int32, Int64, UInt32
from ..compiled import compiled
from ..proposals import LogitsParams
from ..request.request import RequestState, TokenCounts
from ..steps import LogitEdits, Penalties, SamplingRows
from ..tree.tree import TokenTree
from ..tree.tree_loops import PARENT


def penalties_of(params: LogitsParams, counts: TokenCounts, tree: TokenTree) -> Penalties:
    """The penalties of the rows after the root and after each node.

    Tokens that only stand in the tree count where they are on a row's path.
    """
    tokens, times, places = counts.beside(tree.tokens.tolist())
    rows, nodes = path_entries(tree.nodes)
    in_prompt = np.zeros(len(tokens), dtype=np.bool_)
    in_prompt[: counts.num_in_prompt] = True
    return Penalties(
        tokens=tokens,
        counts=times,
        in_prompt=in_prompt,
        path_rows=rows,
        path_tokens=places[nodes],
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
