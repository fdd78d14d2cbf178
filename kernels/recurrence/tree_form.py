"""The same rows as `walk.py`, as products of matrices: all nodes of a tree at once.

With G_t the sum of log decays over the path to node t, and S the state before the tree,

    delta_t + beta_t sum_{s above t} exp(G_t - G_s) (k_s . k_t) delta_s
        = beta_t (v_t - exp(G_t) S' k_t)
    output_t = exp(G_t) S' q_t + sum_{s above t, and t} exp(G_t - G_s) (k_s . q_t) delta_s

which is one triangular system a head. It gives what the recurrence does to rounding, which depends
on the tree. A chunk of a prompt is a tree that is a path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.arrays import Int64
from .step_tables import StepTables

# Rows of a path that are solved at once.
PIECE = 64


class Columns(NamedTuple):
    """Rows that see one another, parents before children but for those whose deltas are known.

    keys        float32 [columns, key_heads, key_dim]
    log_decays  float32 [columns, heads, 1 or key_dim]
    deltas      float32 [known, heads, value_dim]  of the first ones
    sees        bool [columns, columns]  those above each, and itself
    """

    keys: Tensor
    log_decays: Tensor
    deltas: Tensor
    sees: Tensor


def solve_tree(
    state: Tensor, columns: Columns, values: Tensor, rates: Tensor | None, queries: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and deltas, float32 [rows, heads, value_dim], of the columns that are not known.

    state    float32 [heads, key_dim, value_dim]
    values   [rows, heads, value_dim]
    rates    [rows, heads]; None: delta is the value
    queries  [rows, key_heads, key_dim]
    """
    keys, log_decays, known, sees = columns
    num_known, num_heads = len(known), state.shape[0]
    own = slice(num_known, None)
    keys, queries = _by_head(keys, num_heads), _by_head(queries, num_heads)
    values = values.transpose(0, 1)
    totals = torch.einsum("ts,shc->htc", sees.to(state.dtype), log_decays)
    grown = totals.exp()[:, own]
    # [heads, rows, columns, channels or 1]
    between = totals[:, own, None] - totals[:, None]
    between = between.masked_fill(~sees[own][None, :, :, None], -torch.inf).exp()
    known = known.transpose(0, 1)
    if rates is None:
        deltas = values
    else:
        rates = rates.t()[:, :, None]
        right = values - (grown * keys[:, own]) @ state
        above = _products(keys[:, own], keys, between)
        right = rates * (right - above[:, :, :num_known] @ known)
        system = (rates * above[:, :, own]).tril(-1)
        deltas = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    weights = _products(queries, keys, between)
    outputs = (grown * queries) @ state + weights @ torch.cat([known, deltas], dim=1)
    return outputs.transpose(0, 1), deltas.transpose(0, 1)


def state_after(state: Tensor, keys: Tensor, log_decays: Tensor, deltas: Tensor) -> Tensor:
    """The state [heads, key_dim, value_dim] behind a path, from the state before it.

    keys [n, key_heads, key_dim], log_decays [n, heads, 1 or key_dim], deltas [n, heads, value_dim]
    """
    keys, log_decays = _by_head(keys, state.shape[0]), log_decays.transpose(0, 1)
    totals = log_decays.cumsum(dim=1)
    last = totals[:, -1:]
    weighted = keys * (last - totals).exp()
    return last.exp().transpose(1, 2) * state + weighted.transpose(1, 2) @ deltas.transpose(0, 1)


def solve_path(
    state: Tensor, keys: Tensor, log_decays: Tensor, values: Tensor, rates: Tensor | None,
    queries: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs [n, heads, value_dim] of the rows of a path, and the state behind it."""
    outputs = []
    for first in range(0, len(keys), PIECE):
        own = slice(first, first + PIECE)
        count = len(keys[own])
        sees = torch.ones(count, count, dtype=torch.bool, device=state.device).tril()
        columns = Columns(keys[own], log_decays[own], values[:0], sees)
        own_rates = None if rates is None else rates[own]
        found, deltas = solve_tree(state, columns, values[own], own_rates, queries[own])
        outputs.append(found)
        state = state_after(state, keys[own], log_decays[own], deltas)
    return torch.cat(outputs), state


def solve_step(
    states: Tensor, keys: Tensor, log_decays: Tensor, deltas: Tensor, values: Tensor,
    rates: Tensor | None, queries: Tensor, tables: StepTables,
) -> Tensor:  # fmt: skip
    """As `walk`, to rounding that depends on the tree, request by request."""
    outputs = torch.empty_like(values)

    def kept(places: Int64) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.from_numpy(places).to(keys.device)
        return keys[index], log_decays[index], deltas[index]

    for slot, committed, columns, sees, rows, begins in tables.described:
        state = torch.zeros_like(states[slot]) if begins else states[slot]
        if len(committed):
            state = state_after(state, *kept(committed))
        given = values[rows], None if rates is None else rates[rows], queries[rows]
        own_keys, own_decays, own_deltas = kept(columns)
        if sees is None:
            outputs[rows], state = solve_path(state, own_keys, own_decays, *given)
        else:
            num_known = len(columns) - len(given[0])
            seen = torch.from_numpy(sees).to(state.device)
            tree = Columns(own_keys, own_decays, own_deltas[:num_known], seen)
            outputs[rows], found = solve_tree(state, tree, *given)
            deltas[torch.from_numpy(columns[num_known:]).to(deltas.device)] = found
        states[slot] = state
    return outputs


def _by_head(rows: Tensor, num_heads: int) -> Tensor:
    """[heads, n, dim] of [n, key_heads, dim]."""
    return rows.repeat_interleave(num_heads // rows.shape[1], dim=1).transpose(0, 1)


def _products(left: Tensor, right: Tensor, between: Tensor) -> Tensor:
    """[heads, rows, columns] of [heads, rows, dim] and [heads, columns, dim]."""
    if between.shape[-1] == 1:
        return left @ right.transpose(1, 2) * between[..., 0]
    return torch.einsum("htd,hsd,htsd->hts", left, right, between)
