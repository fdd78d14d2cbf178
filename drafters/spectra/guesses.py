"""The compiled loops of SPECTRA's guesses: the trees that the dictionaries of all requests know."""

from __future__ import annotations

import numpy as np

from ...core.arrays import Float32, Int32, Int64
from ...core.compiled import compiled
from ..ngram.ngram_index import add_path
from ..ngram.ngram_maps import NONE, NgramMap, find
from .tables import BEFORE, LAST, LENGTH, NGRAM, PATH, Tables, joined, tables_at

# Of the settings.
MAX_GUESSES, GUESS_LEN, HAS_FORWARD, FORWARD_FIRST = range(4)


@compiled
def guess_all(
    rows: Int64, max_nodes: Int64, assumed: Int32, assumed_ends: Int64, settings: Int64
) -> tuple[Int32, Int32, Float32, Int64]:
    """Tokens, parents, log-probabilities and ends, as in `ProposalBatch`, of a tree for each text
    and what is assumed to follow it.

    assumed: one text's tokens behind the other's, those of text i up to `assumed_ends[i]`
    settings: int64 [4]  most guesses; most tokens of the backward one, 0 for none; 1 or 0: there
    are forward guesses, these come first
    """
    tokens = np.empty(max_nodes.sum(), dtype=np.int32)
    parents = np.empty(len(tokens), dtype=np.int32)
    ends = np.empty(len(rows), dtype=np.int64)
    first, first_assumed = 0, 0
    for place in range(len(rows)):
        most = max_nodes[place]
        nodes = (tokens[first : first + most], parents[first : first + most])
        tables = tables_at(rows, place)
        text = joined(tables[3], assumed[first_assumed : assumed_ends[place]])
        first += _guess(tables, nodes, text, rows[place, NGRAM], settings)
        ends[place], first_assumed = first, assumed_ends[place]
    return tokens[:first], parents[:first], np.zeros(first, dtype=np.float32), ends


@compiled
def _guess(
    tables: Tables, nodes: tuple[Int32, Int32], text: Int32, ngram: int, settings: Int64
) -> int:
    """`text`: what the guesses go on from, at least its last `ngram` - 1 tokens."""
    count, num_left = 0, settings[MAX_GUESSES]
    last, context = text[len(text) - 1 :], text[max(0, len(text) - ngram + 1) :]
    if settings[FORWARD_FIRST]:
        count, num_left = _add_forward(tables, nodes, last, count, num_left, settings)
    if settings[GUESS_LEN] and num_left:
        guess = _backward_guess(tables[1], context, ngram, settings[GUESS_LEN])
        if len(guess):
            count, num_left = add_path(nodes, count, guess), num_left - 1
    if not settings[FORWARD_FIRST]:
        count, num_left = _add_forward(tables, nodes, last, count, num_left, settings)
    return count


@compiled
def _add_forward(
    tables: Tables,
    nodes: tuple[Int32, Int32],
    last: Int32,
    count: int,
    num_left: int,
    settings: Int64,
) -> tuple[int, int]:
    """Nodes and guesses left after the continuations of the last token, the latest first."""
    forward, _, continuations, _ = tables
    entry = find(forward, last) if settings[HAS_FORWARD] else NONE
    known = NONE if entry == NONE else forward[0][entry, LAST]
    while known != NONE and num_left and count < len(nodes[0]):
        row = continuations[known]
        count = add_path(nodes, count, row[PATH : PATH + row[LENGTH]])
        num_left -= 1
        known = row[BEFORE]
    return count, num_left


@compiled
def _backward_guess(backward: NgramMap, context: Int32, ngram: int, guess_len: int) -> Int32:
    """Grow a guess, each token by the longest known suffix of at most `ngram` - 1 tokens."""
    text = np.empty(len(context) + guess_len, dtype=np.int32)
    text[: len(context)] = context
    end = len(context)
    while end < len(text):
        first = max(0, end - ngram + 1)
        entry = NONE
        while first < end and entry == NONE:
            entry = find(backward, text[first:end])
            first += 1
        if entry == NONE:
            break
        text[end] = backward[0][entry, backward[0].shape[1] - 1]
        end += 1
    return text[len(context) : end]
