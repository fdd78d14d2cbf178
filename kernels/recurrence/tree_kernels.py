"""Triton kernel of rows through layers that keep states. Importing this file needs Triton.

It solves the equations of `tree_form.py` by blocks of 16 rows, for all requests of a step at once.
"""

# Triton accepts plain numbers for constexpr parameters, whatever their annotation.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .step_tables import BLOCK, REQUEST_FIELDS, StepTables

LINES = tl.constexpr(BLOCK)
FIELDS = tl.constexpr(REQUEST_FIELDS)
# Tensor cores compute float32 products in three parts, to nearly all of its bits.
PRECISION = tl.constexpr("tf32x3")
# Columns of a state that a program has, and channels that it has in registers at once.
MOST_VALUES, MOST_KEYS = 32, 32
# Set explicitly: Triton warns that its default will change.
LAUNCH = {"enable_fp_fusion": True, "num_warps": 4}


@triton.jit
def load_part(
    at, row, head, first, has, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr
):
    """Numbers `first` and following of rows of [rows, NUM_HEADS, DIM], [LINES, SIZE]; zeros for
    rows that are not there."""
    number = first + tl.arange(0, SIZE)[None, :]
    at += (row * NUM_HEADS + head)[:, None] * DIM + number
    return tl.load(at, has[:, None] & (number < DIM), other=0.0)


@triton.jit
def load_totals(
    at, place, head, first, has, is_path,
    NUM_HEADS: tl.constexpr, DECAYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Sums of log decays along the path to each row, from those of the rows of a path or from the
    sums."""
    total = load_part(at, place, head, first, has, NUM_HEADS, DECAYS, SIZE)
    if is_path:
        total = tl.cumsum(total, axis=0)
    return total


@triton.jit
def load_sight(sees, first_bits, row, column, num_blocks, has):
    """Whether the rows of one block see those of another, [LINES, LINES]."""
    line = tl.arange(0, LINES)
    bits = tl.load(sees + first_bits + (row * LINES + line) * num_blocks + column, has, other=0)
    return ((bits[:, None] >> line[None, :]) & 1) != 0


@triton.jit
def decayed_products(left, right, left_totals, right_totals):
    """[LINES, LINES] of [LINES, KEYS] each, with a decay of each channel between two rows."""
    line = tl.arange(0, LINES)[:, None]
    found = tl.zeros([LINES, LINES], dtype=tl.float32)
    for number in range(LINES):
        is_it = line == number
        own = tl.sum(tl.where(is_it, left, 0.0), axis=0)[None, :]
        total = tl.sum(tl.where(is_it, left_totals, 0.0), axis=0)[None, :]
        # It would grow between rows of which neither sees the other.
        between = tl.exp(tl.minimum(total - right_totals, 0.0))
        found = tl.where(is_it, tl.sum(own * right * between, axis=1)[None, :], found)
    return found


@triton.jit
def weigh(
    queries, keys, totals, row, is_own, place, has, other, has_other, sight, head, key_head,
    is_path, NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr, DECAYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What a block's outputs and deltas take of the deltas of another: [LINES, LINES] each."""
    of_queries = tl.zeros([LINES, LINES], dtype=tl.float32)
    of_keys = tl.zeros([LINES, LINES], dtype=tl.float32)
    for first in range(0, KEY_DIM, KEYS):
        query = load_part(queries, row, key_head, first, is_own, NUM_KEY_HEADS, KEY_DIM, KEYS)
        key = load_part(keys, place, key_head, first, has, NUM_KEY_HEADS, KEY_DIM, KEYS)
        right = load_part(keys, other, key_head, first, has_other, NUM_KEY_HEADS, KEY_DIM, KEYS)
        if DECAYS > 1:
            own = load_totals(totals, place, head, first, has, is_path, NUM_HEADS, DECAYS, SIZE)
            its = load_totals(
                totals, other, head, first, has_other, is_path, NUM_HEADS, DECAYS, SIZE
            )
            of_queries += decayed_products(query, right, own, its)
            of_keys += decayed_products(key, right, own, its)
        else:
            right = tl.trans(right)
            of_queries = tl.dot(query, right, of_queries, input_precision=PRECISION)
            of_keys = tl.dot(key, right, of_keys, input_precision=PRECISION)
    if DECAYS == 1:
        own = load_totals(totals, place, head, 0, has, is_path, NUM_HEADS, DECAYS, SIZE)
        its = load_totals(totals, other, head, 0, has_other, is_path, NUM_HEADS, DECAYS, SIZE)
        between = tl.exp(tl.minimum(own - tl.trans(its), 0.0))
        of_queries *= between
        of_keys *= between
    return tl.where(sight, of_queries, 0.0), tl.where(sight, of_keys, 0.0)


@triton.jit
def advance(
    at_state, keys, log_decays, place, has, delta, head, key_head, has_value,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, DECAYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Bring a state over the rows of a path."""
    # Other threads may still read it.
    tl.debug_barrier()
    for first in range(0, KEY_DIM, KEYS):
        number = first + tl.arange(0, KEYS)[:, None]
        key = load_part(keys, place, key_head, first, has, NUM_KEY_HEADS, KEY_DIM, KEYS)
        decays = load_part(log_decays, place, head, first * (DECAYS > 1), has, NUM_HEADS, DECAYS,
                           SIZE)  # fmt: skip
        total = tl.sum(decays, axis=0)[None, :]
        weighted = key * tl.exp(total - tl.cumsum(decays, axis=0))
        in_state = (number < KEY_DIM) & has_value
        state = tl.load(at_state + number * VALUE_DIM, in_state, other=0.0)
        state = tl.dot(
            tl.trans(weighted), delta, tl.trans(tl.exp(total)) * state, input_precision=PRECISION
        )
        tl.store(at_state + number * VALUE_DIM, state, in_state)
    tl.debug_barrier()


@triton.jit
def clear(at_state, has_value, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr):
    """Make a state zeros."""
    for first in range(0, KEY_DIM, KEYS):
        number = first + tl.arange(0, KEYS)[:, None]
        in_state = (number < KEY_DIM) & has_value
        tl.store(at_state + number * VALUE_DIM, 0.0, in_state)
    tl.debug_barrier()


@triton.jit
def sum_paths(
    totals, log_decays, columns, sees, first_bits, num_columns, head,
    NUM_HEADS: tl.constexpr, DECAYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the sums of log decays along the path to each column of a tree."""
    line = tl.arange(0, LINES)
    num_blocks = tl.cdiv(num_columns, LINES)
    for block in range(num_blocks):
        has = block * LINES + line < num_columns
        place = tl.load(columns + block * LINES + line, has, other=0).to(tl.int64)
        for first in range(0, DECAYS, SIZE):
            total = tl.zeros([LINES, SIZE], dtype=tl.float32)
            for other in range(num_blocks):
                has_other = other * LINES + line < num_columns
                its = tl.load(columns + other * LINES + line, has_other, other=0).to(tl.int64)
                decays = load_part(log_decays, its, head, first, has_other, NUM_HEADS, DECAYS, SIZE)
                sight = load_sight(sees, first_bits, block, other, num_blocks, has)
                if DECAYS > 1:
                    total = tl.dot(sight.to(tl.float32), decays, total, input_precision=PRECISION)
                else:
                    total += tl.sum(tl.where(sight, tl.trans(decays), 0.0), axis=1)[:, None]
            number = first + tl.arange(0, SIZE)[None, :]
            at = totals + (place * NUM_HEADS + head)[:, None] * DECAYS + number
            tl.store(at, total, has[:, None] & (number < DECAYS))
    # Other threads read what these wrote.
    tl.debug_barrier()


@triton.jit
def solved(system, right):
    """x [LINES, VALUES] of (1 + system) x = right, whose system is strictly lower triangular."""
    line = tl.arange(0, LINES)[:, None]
    for number in range(1, LINES):
        is_it = line == number
        own = tl.sum(tl.where(is_it, system, 0.0), axis=0)[:, None]
        right = tl.where(is_it, right - tl.sum(own * right, axis=0)[None, :], right)
    return right


@triton.jit
def solve_requests(
    states, keys, log_decays, deltas, totals, values, rates, queries, outputs,
    requests, columns, sees,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    DECAYS: tl.constexpr, SIZE: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Program (request, head, columns of its state); see `StepTables`.

    totals   float32 like `log_decays`, for those along the path to each node of a tree
    KEYS     channels at once
    DECAYS   of a head, SIZE of them at once
    """
    at = requests + tl.program_id(0) * FIELDS
    num_committed, num_known, num_rows = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    if num_rows == 0:
        return
    slot = tl.load(at).to(tl.int64)
    columns += tl.load(at + 1)
    first_row, first_bits = tl.load(at + 5), tl.load(at + 6)
    is_path = first_bits < 0
    head = tl.program_id(1)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    line = tl.arange(0, LINES)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)[None, :]
    has_value = value < VALUE_DIM
    at_state = states + (slot * NUM_HEADS + head) * KEY_DIM * VALUE_DIM + value
    if tl.load(at + 7) != 0:
        clear(at_state, has_value, KEY_DIM, VALUE_DIM, KEYS)
    for first in range(0, num_committed, LINES):
        has = first + line < num_committed
        place = tl.load(columns + first + line, has, other=0).to(tl.int64)
        at_delta = deltas + (place * NUM_HEADS + head)[:, None] * VALUE_DIM + value
        delta = tl.load(at_delta, has[:, None] & has_value, other=0.0)
        advance(
            at_state, keys, log_decays, place, has, delta, head, key_head, has_value,
            NUM_HEADS, NUM_KEY_HEADS, KEY_DIM, VALUE_DIM, KEYS, DECAYS, SIZE,
        )  # fmt: skip
    columns += num_committed
    num_columns = num_known + num_rows
    num_blocks = tl.cdiv(num_columns, LINES)
    if is_path:
        totals = log_decays
    else:
        sum_paths(
            totals, log_decays, columns, sees, first_bits, num_columns, head,
            NUM_HEADS, DECAYS, SIZE,
        )  # fmt: skip
    for block in range(num_known // LINES, num_blocks):
        column = block * LINES + line
        has = column < num_columns
        is_own = has & (column >= num_known)
        place = tl.load(columns + column, has, other=0).to(tl.int64)
        row = (first_row + column - num_known).to(tl.int64)
        at_delta = deltas + (place * NUM_HEADS + head)[:, None] * VALUE_DIM + value
        at_value = (row * NUM_HEADS + head)[:, None] * VALUE_DIM + value
        in_rows = is_own[:, None] & has_value
        # Of the state before the tree.
        output = tl.zeros([LINES, VALUES], dtype=tl.float32)
        found = tl.zeros([LINES, VALUES], dtype=tl.float32)
        for first in range(0, KEY_DIM, KEYS):
            query = load_part(queries, row, key_head, first, is_own, NUM_KEY_HEADS, KEY_DIM, KEYS)
            key = load_part(keys, place, key_head, first, has, NUM_KEY_HEADS, KEY_DIM, KEYS)
            if DECAYS > 1:
                grown = tl.exp(
                    load_totals(totals, place, head, first, has, is_path, NUM_HEADS, DECAYS, SIZE)
                )
                query *= grown
                key *= grown
            number = first + tl.arange(0, KEYS)[:, None]
            state = tl.load(
                at_state + number * VALUE_DIM, (number < KEY_DIM) & has_value, other=0.0
            )
            output = tl.dot(query, state, output, input_precision=PRECISION)
            found = tl.dot(key, state, found, input_precision=PRECISION)
        if DECAYS == 1:
            grown = tl.exp(
                load_totals(totals, place, head, 0, has, is_path, NUM_HEADS, DECAYS, SIZE)
            )
            output *= grown
            found *= grown
        num_before = block
        if is_path:
            num_before = 0
        for other in range(num_before):
            its = tl.load(columns + other * LINES + line).to(tl.int64)
            has_other = line >= 0
            sight = load_sight(sees, first_bits, block, other, num_blocks, has)
            of_queries, of_keys = weigh(
                queries, keys, totals, row, is_own, place, has, its, has_other, sight, head,
                key_head, is_path, NUM_HEADS, NUM_KEY_HEADS, KEY_DIM, KEYS, DECAYS, SIZE,
            )  # fmt: skip
            at_other = deltas + (its * NUM_HEADS + head)[:, None] * VALUE_DIM + value
            delta = tl.load(at_other, has_value & has_other[:, None], other=0.0)
            output = tl.dot(of_queries, delta, output, input_precision=PRECISION)
            found = tl.dot(of_keys, delta, found, input_precision=PRECISION)
        sight = line[:, None] >= line[None, :]
        if not is_path:
            sight = load_sight(sees, first_bits, block, block, num_blocks, has)
        of_queries, of_keys = weigh(
            queries, keys, totals, row, is_own, place, has, place, has, sight, head,
            key_head, is_path, NUM_HEADS, NUM_KEY_HEADS, KEY_DIM, KEYS, DECAYS, SIZE,
        )  # fmt: skip
        # Those of rows that are known stay.
        delta = tl.load(at_delta, (has & (column < num_known))[:, None] & has_value, other=0.0)
        added = tl.load(values + at_value, in_rows, other=0.0)
        if CORRECTS:
            rate = tl.load(rates + row * NUM_HEADS + head, is_own, other=0.0)[:, None]
            system = tl.where(line[:, None] > line[None, :], rate * of_keys, 0.0)
            delta = solved(system, delta + rate * (added - found))
        else:
            delta += added
        output = tl.dot(of_queries, delta, output, input_precision=PRECISION)
        tl.store(at_delta, delta, in_rows)
        tl.store(outputs + at_value, output, in_rows)
        if is_path:
            advance(
                at_state, keys, log_decays, place, has, delta, head, key_head, has_value,
                NUM_HEADS, NUM_KEY_HEADS, KEY_DIM, VALUE_DIM, KEYS, DECAYS, SIZE,
            )  # fmt: skip
        else:
            tl.debug_barrier()


def solve_step(
    states: Tensor, keys: Tensor, log_decays: Tensor, deltas: Tensor, values: Tensor,
    rates: Tensor | None, queries: Tensor, tables: StepTables,
) -> Tensor:  # fmt: skip
    """As `walk`, to rounding that depends on the tree; see `tree_form.py`."""
    num_heads, key_dim, value_dim = states.shape[1:]
    # Padding rows have zeros.
    outputs = torch.zeros_like(values)
    sizes = tile_sizes(key_dim, value_dim, log_decays.shape[2])
    solve_requests[tables.num_requests, num_heads, triton.cdiv(value_dim, sizes["VALUES"])](
        states, keys, log_decays, deltas, torch.empty_like(log_decays), values,
        values if rates is None else rates, queries, outputs,
        tables.requests, tables.columns, tables.sees,
        NUM_HEADS=num_heads, NUM_KEY_HEADS=keys.shape[1], KEY_DIM=key_dim, VALUE_DIM=value_dim,
        DECAYS=log_decays.shape[2], CORRECTS=rates is not None, **sizes, **LAUNCH,
    )  # fmt: skip
    return outputs


def tile_sizes(key_dim: int, value_dim: int, num_decays: int) -> dict[str, int]:
    """Channels, columns and decays of a head that a program has at once; `tl.dot` wants 16."""
    keys, values = (
        max(BLOCK, min(most, triton.next_power_of_2(dim)))
        for most, dim in ((MOST_KEYS, key_dim), (MOST_VALUES, value_dim))
    )
    return {"KEYS": keys, "VALUES": values, "SIZE": 1 if num_decays == 1 else keys}
