"""Token trees through a layer that keeps a state, by its own recurrence.

A head has a state S [key_dim, value_dim]. A token with key k, value v, query q, learning rate beta
and log decay g <= 0 (of the head, or of each channel of its keys) does

    S <- exp(g) S;  delta = beta (v - S' k);  S <- S + k delta';  output = S' q

and with `delta = v` the same is Mamba-2's. A node goes on from its parent's state, so its numbers
are those of its path alone, bit by bit: as a node, as a token of a prompt and as the only token of
a step. What stays of a token is its k, g and delta, which bring a state over it with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def walk(
    states: Tensor, keys: Tensor, log_decays: Tensor, deltas: Tensor, values: Tensor,
    rates: Tensor | None, queries: Tensor, order: Tensor,
) -> Tensor:  # fmt: skip
    """Go over the rows in `order`, each of which is computed, or has a delta already. Returns the
    outputs, float32 [rows, heads, value_dim].

    states      float32 [slots, heads, key_dim, value_dim]  the requests'; written
    keys        float32 [kept rows, key_heads, key_dim]; a key's head serves consecutive heads
    log_decays  float32 [kept rows, heads, 1 or key_dim]
    deltas      float32 [kept rows, heads, value_dim]  written for rows that are computed
    values      float32 [rows, heads, value_dim]
    rates       float32 [rows, heads]; None: delta is the value
    queries     float32 [rows, key_heads, key_dim]
    order       int32 [m, 4]  parents before children: kept row; row of the step, or -1 where its
                delta is known; where the state before it is, and where the one behind it goes: a
                buffer, or -1 - slot
    """
    outputs = torch.empty_like(values)
    group = states.shape[1] // keys.shape[1]
    buffers: dict[int, Tensor] = {}
    for row, own, source, target in order.tolist():
        before = buffers[source] if source >= 0 else states[-1 - source]
        state = before * log_decays[row].exp()[..., None]
        key = keys[row].repeat_interleave(group, dim=0)[..., None]
        if own >= 0:
            deltas[row] = values[own]
            if rates is not None:
                deltas[row] -= (state * key).sum(dim=1)
                deltas[row] *= rates[own, :, None]
        state += key * deltas[row][:, None]
        if own >= 0:
            query = queries[own].repeat_interleave(group, dim=0)[..., None]
            outputs[own] = (state * query).sum(dim=1)
        if target >= 0:
            buffers[target] = state
        else:
            states[-1 - target] = state
    return outputs
