"""Token trees through a layer that keeps a state, by its own recurrence.

A head has a state S [key_dim, value_dim]. A token with key k, value v, query q, learning rate beta
and log decay g <= 0 (of the head, or of each channel of its keys) does

    S <- exp(g) S;  delta = beta (v - S' k);  S <- S + k delta';  output = S' q

and with `delta = v` the same is Mamba-2's. A node goes on from its parent's state, so its numbers
are those of its path alone, bit by bit: as a node, as a token of a prompt and as the only token of
a step. What stays of a token is its k, g and delta, which bring a state over it with the same bits.
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Float32, Int32
from ...core.compiled import compiled

# Columns of the order.
ROW, OWN, SOURCE, TARGET = range(4)


@compiled
def walk(  # noqa: PLR0913, PLR0917 - flat arrays, and one loop over them
    states: Float32,
    buffers: Float32,
    keys: Float32,
    log_decays: Float32,
    deltas: Float32,
    values: Float32,
    rates: Float32,
    queries: Float32,
    outputs: Float32,
    order: Int32,
    corrects: bool,
) -> None:
    """Go over the rows in `order`, each of which is computed, or has a delta already.

    states      [slots, heads, key_dim, value_dim]  the requests'
    buffers     [n, key_dim, value_dim]  for states of nodes
    keys        [kept rows, key_heads, key_dim]; a key's head serves consecutive heads
    log_decays  [kept rows, heads, 1 or key_dim]
    deltas      [kept rows, heads, value_dim]  written for rows that are computed
    values      [rows, heads, value_dim], rates [rows, heads], queries [rows, key_heads, key_dim]
    outputs     [rows, heads, value_dim]  written
    order       int32 [m, 4]  parents before children: kept row; row of the step, or -1 where its
                delta is known; where the state before it is, and where the one behind it goes: a
                buffer, or -1 - slot
    corrects    the delta rule; else delta is the value
    """
    num_heads, key_dim, value_dim = states.shape[1:]
    group = num_heads // keys.shape[1]
    has_channels = log_decays.shape[2] > 1
    found = np.empty(value_dim, dtype=np.float32)
    for head in range(num_heads):
        key_head = head // group
        for place in range(len(order)):
            row, own, source, target = order[place]
            state = buffers[target] if target >= 0 else states[-1 - target, head]
            decay = np.exp(log_decays[row, head, 0])
            if source == target:
                for channel in range(key_dim):
                    if has_channels:
                        decay = np.exp(log_decays[row, head, channel])
                    line = state[channel]
                    for column in range(value_dim):
                        line[column] *= decay
            else:
                before = buffers[source] if source >= 0 else states[-1 - source, head]
                for channel in range(key_dim):
                    if has_channels:
                        decay = np.exp(log_decays[row, head, channel])
                    line, old = state[channel], before[channel]
                    for column in range(value_dim):
                        line[column] = old[column] * decay
            key, delta = keys[row, key_head], deltas[row, head]
            if own >= 0:
                _find_delta(state, key, values[own, head], rates[own, head], corrects, found, delta)
            for channel in range(key_dim):
                weight, line = key[channel], state[channel]
                for column in range(value_dim):
                    line[column] += weight * delta[column]
            if own >= 0:
                _read(state, queries[own, key_head], outputs[own, head])


@compiled
def _find_delta(
    state: Float32,
    key: Float32,
    value: Float32,
    rate: float,
    corrects: bool,
    found: Float32,
    delta: Float32,
) -> None:
    """Write what a token adds, given the decayed state. `found`: room for what that holds."""
    if not corrects:
        delta[:] = value
        return
    _read(state, key, found)
    for column in range(len(delta)):
        delta[column] = rate * (value[column] - found[column])


@compiled
def _read(state: Float32, weights: Float32, result: Float32) -> None:
    """Write S' w, in the order of channels."""
    result[:] = 0.0
    for channel in range(len(weights)):
        weight, line = weights[channel], state[channel]
        for column in range(len(result)):
            result[column] += weight * line[column]


def load_walk() -> None:
    """Compile the loops, or load them, so that no step waits for it."""
    ones = np.ones((1, 1, 1), dtype=np.float32)
    order = np.array([[0, 0, -1, 0], [0, -1, -1, -1]], dtype=np.int32)
    states, outputs, rates = ones[None].copy(), ones.copy(), ones[0].copy()
    walk(states, ones, ones, ones, ones, ones, rates, ones, outputs, order, True)
