"""The Triton kernel of attention over paged KV, `attend_tiles`.

Items share only the partial results of a split context. The last item to finish merges them, in the
order of the context. So a row's result depends only on the lines of its tile and on where its
context is split, not on the other rows of the step. Names in capitals are constants of the compiled
kernel. Importing this file needs Triton.
"""

# Annotations in a kernel are Triton types.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .tile_plan import ITEM_FIELDS, MOST_SPLITS, REQUEST_FIELDS

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FIELDS_OF_ITEM = tl.constexpr(ITEM_FIELDS)
FIELDS_OF_REQUEST = tl.constexpr(REQUEST_FIELDS)
SPLITS = tl.constexpr(MOST_SPLITS)


@triton.jit
def _soft_bounded(logits, bound):
    """bound * tanh(logits / bound), by an exponential that cannot overflow."""
    ratio = logits / bound
    shrink = tl.exp2(tl.abs(ratio) * (-2.0 * LOG2E))
    size = bound * (1.0 - shrink) / (1.0 + shrink)
    return tl.where(ratio < 0, -size, size)


@triton.jit
def _load_pairs(
    cache, slots, seen, numbers, DOT: tl.constexpr, BY_ROW: tl.constexpr, ROTATED_DIM: tl.constexpr
):  # fmt: skip
    """Keys (as (key, rotated part)) and values of `slots`, and what logits of the keys are
    multiplied by.

    Zeros where no row sees them, since 0 * NaN is NaN.
    """
    pairs, scales, stride_slot, stride_value, stride_scale = cache
    dims, dim_ok, rotated_dims, rotated_ok = numbers
    slots = slots.to(tl.int64)
    offsets = slots[:, None] * stride_slot + dims[None, :]
    mask = seen[:, None] & dim_ok[None, :]
    keys = tl.load(pairs + offsets, mask=mask, other=0.0).to(DOT)
    if ROTATED_DIM > 0:
        values = keys
        at_rotated = pairs + (slots[:, None] * stride_slot + rotated_dims[None, :])
        rotated_mask = seen[:, None] & rotated_ok[None, :]
        rotated = tl.load(at_rotated, mask=rotated_mask, other=0.0).to(DOT)
    else:
        values = tl.load(pairs + stride_value + offsets, mask=mask, other=0.0).to(DOT)
        rotated = keys
    key_scales = 1.0
    if BY_ROW:
        at = scales + slots * 2 * stride_scale
        key_scales = tl.load(at, mask=seen, other=1.0)[None, :]
        value_scales = tl.load(at + stride_scale, mask=seen, other=1.0)
        # Exact: powers of two.
        values *= value_scales.to(DOT)[:, None]
    return (keys, rotated), values, key_scales


@triton.jit
def _fold(
    state, query, key, values, visible, logit_scale, softcap,
    HAS_SOFTCAP: tl.constexpr, KEEP: tl.constexpr, ROTATED_DIM: tl.constexpr,
):  # fmt: skip
    """Add a tile of columns to (weighted sum, weight, largest logit to the base 2) of each line.

    query, key  vectors of lines and columns, and their rotated parts, which only latents have
    """
    total, weight, top = state
    lines, rotated_lines = query
    keys, rotated_keys = key
    logits = tl.dot(lines, tl.trans(keys), input_precision="ieee")
    if ROTATED_DIM > 0:
        logits = tl.dot(rotated_lines, tl.trans(rotated_keys), logits, input_precision="ieee")
    logits *= logit_scale
    if HAS_SOFTCAP:
        logits = _soft_bounded(logits, softcap)
    logits = tl.where(visible, logits * LOG2E, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    # Avoids infinity minus infinity in a line that has seen no column yet.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    shares = tl.exp2(logits - shift[:, None])
    decay = tl.exp2(top - shift)
    weight = weight * decay + tl.sum(shares, 1)
    rounded = shares.to(KEEP).to(lines.dtype)
    product = tl.dot(rounded, values, input_precision="ieee")
    return total * decay[:, None] + product, weight, new_top


@triton.jit
def _over_context(
    state, queries, bounds, table, cache, numbers, scoring,
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, BY_ROW: tl.constexpr, KEEP: tl.constexpr, DOT: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
):  # fmt: skip
    """Add the context's columns `bounds` (begin, end), which all lines see, except for
    the window.

    `queries` (vectors as `_fold` takes them, positions, whether a line is used); `cache` and
    `numbers` as `_load_pairs` takes them; `scoring` (scale of the logits, window, softcap).
    """
    lines, position, is_line = queries
    begin, end = bounds
    logit_scale, window, softcap = scoring
    column = begin + tl.arange(0, COLUMNS)
    block = tl.load(table + column // BLOCK_SIZE, mask=column < end, other=0)
    for _ in range(begin, end, COLUMNS):
        seen = column < end
        slots = block.to(tl.int64) * BLOCK_SIZE + column % BLOCK_SIZE
        keys, values, key_scales = _load_pairs(
            cache, slots, seen, numbers, DOT, BY_ROW, ROTATED_DIM
        )
        # Block ids are loaded one iteration ahead; otherwise the copies of keys could not be
        # pipelined.
        following = column + COLUMNS
        block = tl.load(table + following // BLOCK_SIZE, mask=following < end, other=0)
        visible = seen[None, :] & is_line[:, None]
        if HAS_WINDOW:
            visible = visible & (position[:, None] - column[None, :] < window)
        scale = logit_scale * key_scales
        state = _fold(
            state, lines, keys, values, visible, scale, softcap, HAS_SOFTCAP, KEEP, ROTATED_DIM
        )
        column = following
    return state


@triton.jit
def _over_own(
    state, queries, own_columns, bits, cache, numbers, scoring,
    COLUMNS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BY_ROW: tl.constexpr, KEEP: tl.constexpr, DOT: tl.constexpr, ROTATED_DIM: tl.constexpr,
):  # fmt: skip
    """Add the step's own columns (slots, positions, number), masked by `bits`.

    `bits` (is_causal, row of the request, first word of the row); the others are those of
    `_over_context`.
    """
    lines, position, is_line = queries
    own_slots, own_positions, num_own = own_columns
    is_causal, row_of_request, words = bits
    logit_scale, window, softcap = scoring
    for start in range(0, num_own, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < num_own
        if is_causal == 1:
            visible = column[None, :] <= row_of_request[:, None]
        else:
            # One word holds the bits of the whole tile of columns.
            word = tl.load(words + start // 64, mask=is_line, other=0)
            visible = ((word[:, None] >> (column % 64).to(tl.int64)[None, :]) & 1) == 1
        visible = visible & is_column[None, :] & is_line[:, None]
        if HAS_WINDOW:
            column_position = tl.load(own_positions + column, mask=is_column, other=0)
            visible = visible & (position[:, None] - column_position[None, :] < window)
        seen = tl.max(visible.to(tl.int32), 0) > 0
        slots = tl.load(own_slots + column, mask=is_column, other=0)
        keys, values, key_scales = _load_pairs(
            cache, slots, seen, numbers, DOT, BY_ROW, ROTATED_DIM
        )
        scale = logit_scale * key_scales
        state = _fold(
            state, lines, keys, values, visible, scale, softcap, HAS_SOFTCAP, KEEP, ROTATED_DIM
        )
    return state


@triton.jit
def _head_pointers(tensor, rows, heads, dims, stride_row, stride_head):
    """Addresses [lines, dims] of one head a line; rows are int64, as offsets may exceed 2^31."""
    offsets = rows[:, None] * stride_row + heads[:, None] * stride_head
    return tensor + offsets + dims[None, :]


@triton.jit
def _logit_scale(scaling, scales, kv_head, HAS_SCALES: tl.constexpr):
    """The factor of the logits, that of stored keys included, if it is one for all."""
    if HAS_SCALES:
        scaling = scaling * tl.load(scales + kv_head)
    return scaling


@triton.jit
def _context_bounds(item, position, window, HAS_WINDOW: tl.constexpr):
    """The item's first column of the context that any line sees, and the end of its part."""
    begin = tl.load(item + 3)
    if HAS_WINDOW:
        begin = tl.maximum(begin, tl.min(position, 0) - window + 1)
    return begin, tl.load(item + 4)


@triton.jit
def _empty_state(LINES: tl.constexpr, DIMS: tl.constexpr):
    """The initial state of `_fold`, before any column."""
    total = tl.zeros([LINES, DIMS], dtype=tl.float32)
    weight = tl.zeros([LINES], dtype=tl.float32)
    top = tl.full([LINES], float("-inf"), dtype=tl.float32)
    return total, weight, top


@triton.jit
def _finish(state, scales, kv_head, HAS_SCALES: tl.constexpr):
    """The weighted mean of each line [lines, dims], and its log-sum-exp to the base 2 [lines].

    Zeros and -inf of a line that saw no column.
    """
    total, weight, top = state
    is_empty = weight == 0
    safe_weight = tl.where(is_empty, 1.0, weight)
    result = total / safe_weight[:, None]
    if HAS_SCALES:
        # The scales of values come after those of keys.
        result *= tl.load(scales + tl.num_programs(1) + kv_head)
    return result, tl.where(is_empty, float("-inf"), top + tl.log2(safe_weight))


@triton.jit
def _lines_of(item, kv_head, positions, SHARE: tl.constexpr, LINES: tl.constexpr):
    """An item's lines: rows of the step, query heads, positions, and which of them it has."""
    line = tl.arange(0, LINES)
    row = tl.load(item + 1) + line // SHARE
    is_line = line // SHARE < tl.load(item + 2)
    position = tl.load(positions + row, mask=is_line, other=2147483647)
    return row, kv_head * SHARE + line % SHARE, position, is_line


@triton.jit
def _store_partial(
    item, results, partials, kv_head, is_line, dims, dim_ok,
    HEAD_DIM: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Store (results, log-sums) of an item's lines in (`partial_out`, `partial_sums`)."""
    result, sums = results
    partial_out, partial_sums = partials
    line = (tl.load(item + 6) + tl.arange(0, LINES)).to(tl.int64)
    at = line * tl.num_programs(1) + kv_head
    tl.store(partial_sums + at, sums, mask=is_line)
    at_out = partial_out + at[:, None] * HEAD_DIM + dims[None, :]
    tl.store(at_out, result, mask=is_line[:, None] & dim_ok[None, :])


@triton.jit
def _is_last(item, arrived, kv_head):
    """Whether all other items of a tile have stored their results, so that these may be read.

    The last item to finish gets True, and resets the count to 0 for the next launch.
    """
    at = arrived + tl.load(item + 7).to(tl.int64) * tl.num_programs(1) + kv_head
    # One thread counts for the program, after all its threads have stored their results; `acq_rel`
    # publishes these.
    tl.debug_barrier()
    before = tl.atomic_add(at, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    is_last = before == tl.load(item + 8) - 1
    tl.store(at, 0, mask=is_last)
    return is_last


@triton.jit
def _merged(
    item, partials, lines_between, kv_head, is_line, dims, dim_ok,
    HEAD_DIM: tl.constexpr, LINES: tl.constexpr, DIMS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The merged results and log-sums of a tile's splits, as `_finish` returns them.

    lines_between  from a line's result in one split to that in the next

    Loads bypass the L1 cache, which may hold stale data.
    """
    partial_out, partial_sums = partials
    count = tl.load(item + 8)
    split = tl.arange(0, SPLITS)[:, None]
    line = (tl.load(item + 7) + tl.arange(0, LINES)).to(tl.int64)
    heads = tl.num_programs(1)
    at_all = (line[None, :] + split * lines_between) * heads + kv_head
    counts = tl.where(is_line, count, 0)
    found = tl.load(
        partial_sums + at_all, mask=split < counts[None, :], other=float("-inf"),
        cache_modifier=".cg",
    )  # fmt: skip
    top = tl.max(found, 0)
    is_empty = top == float("-inf")
    shift = tl.where(is_empty, 0.0, top)
    weight = tl.where(is_empty, 1.0, tl.sum(tl.exp2(found - shift[None, :]), 0))
    total = tl.zeros([LINES, DIMS], dtype=tl.float32)
    for first in range(0, count, GROUP):
        # Number of loads in flight at once.
        for index in tl.static_range(GROUP):  # pyright: ignore[reportGeneralTypeIssues]
            is_there = first + index < counts
            at = (line + (first + index) * lines_between) * heads + kv_head
            log_sum = tl.load(
                partial_sums + at, mask=is_there, other=float("-inf"), cache_modifier=".cg"
            )
            at_part = partial_out + at[:, None] * HEAD_DIM + dims[None, :]
            mask = is_there[:, None] & dim_ok[None, :]
            part = tl.load(at_part, mask=mask, other=0.0, cache_modifier=".cg")
            total += part * tl.exp2(log_sum - shift)[:, None]
    sums = tl.where(is_empty, float("-inf"), top + tl.log2(weight))
    return total / weight[:, None], sums


@triton.jit
def _store_results(results, places, targets, HAS_SUMS: tl.constexpr, KEEP: tl.constexpr):
    """Store (results, log-sums to the base 2) of lines where those of their rows and heads are."""
    result, sums = results
    rows, heads, is_line, dims, dim_ok = places
    out, log_sums, stride_out_row, stride_out_head, stride_sums_row = targets
    at_out = _head_pointers(out, rows, heads, dims, stride_out_row, stride_out_head)
    tl.store(at_out, result.to(KEEP), mask=is_line[:, None] & dim_ok[None, :])
    if HAS_SUMS:
        tl.store(log_sums + rows * stride_sums_row + heads, sums * LN2, mask=is_line)


# One kernel for trees of any size.
@triton.jit(do_not_specialize=["num_words"])
def attend_tiles(
    query, pairs, out, log_sums, scales, partial_out, partial_sums, arrived, item_count,
    items, requests, positions, ancestors, own_slots, own_positions, first_blocks, blocks,
    num_words, scaling, window, softcap,
    stride_query_row, stride_query_head, stride_slot, stride_value, stride_kv_head,
    stride_out_row, stride_out_head, stride_sums_row,
    BLOCK_SIZE: tl.constexpr, SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    ROTATED_DIM: tl.constexpr, ROTATED_DIMS: tl.constexpr,
    LINES: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
    BY_ROW: tl.constexpr, HAS_SUMS: tl.constexpr, KEEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (index, kv head): item `index`, and others as many on as there are programs."""
    kv_head = tl.program_id(1)
    dims = tl.arange(0, DIMS)
    dim_ok = dims < HEAD_DIM
    rotated_dims = HEAD_DIM + tl.arange(0, ROTATED_DIMS)
    rotated_ok = rotated_dims < HEAD_DIM + ROTATED_DIM
    numbers = (dims, dim_ok, rotated_dims, rotated_ok)
    scoring = (_logit_scale(scaling, scales, kv_head, HAS_SCALES), window, softcap)
    heads = tl.num_programs(1)
    cache = (
        pairs + kv_head * stride_kv_head, scales + kv_head, stride_slot, stride_value, heads
    )  # fmt: skip
    for index in range(tl.program_id(0), tl.load(item_count), tl.num_programs(0)):
        item = items + index * FIELDS_OF_ITEM
        request = tl.load(item)
        facts = requests + request * FIELDS_OF_REQUEST
        row, head, position, is_line = _lines_of(item, kv_head, positions, SHARE, LINES)
        wide_row = row.to(tl.int64)
        line_mask = is_line[:, None] & dim_ok[None, :]
        at_query = _head_pointers(query, wide_row, head, dims, stride_query_row, stride_query_head)
        lines = tl.load(at_query, mask=line_mask, other=0.0).to(DOT)
        rotated_lines = lines
        if ROTATED_DIM > 0:
            at_rotated = _head_pointers(
                query, wide_row, head, rotated_dims, stride_query_row, stride_query_head
            )
            rotated_mask = is_line[:, None] & rotated_ok[None, :]
            rotated_lines = tl.load(at_rotated, mask=rotated_mask, other=0.0).to(DOT)
        queries = ((lines, rotated_lines), position, is_line)
        state = _over_context(
            _empty_state(LINES, DIMS), queries, _context_bounds(item, position, window, HAS_WINDOW),
            blocks + tl.load(first_blocks + request), cache, numbers, scoring,
            BLOCK_SIZE, COLUMNS, HAS_WINDOW, HAS_SOFTCAP, BY_ROW, KEEP, DOT, ROTATED_DIM,
        )  # fmt: skip
        first_own = tl.load(facts + 3)
        own_columns = (own_slots + first_own, own_positions + first_own, tl.load(item + 5))
        bits = (tl.load(facts + 5), row - tl.load(facts), ancestors + wide_row * num_words)
        state = _over_own(
            state, queries, own_columns, bits, cache, numbers, scoring,
            COLUMNS, HAS_WINDOW, HAS_SOFTCAP, BY_ROW, KEEP, DOT, ROTATED_DIM,
        )  # fmt: skip
        results = _finish(state, scales, kv_head, HAS_SCALES)
        places = (wide_row, head, is_line, dims, dim_ok)
        targets = (out, log_sums, stride_out_row, stride_out_head, stride_sums_row)
        # Each branch stores its own results: those of both at once would not fit the registers.
        if tl.load(item + 8) == 1:
            _store_results(results, places, targets, HAS_SUMS, KEEP)
        else:
            partials = (partial_out, partial_sums)
            _store_partial(item, results, partials, kv_head, is_line, dims, dim_ok, HEAD_DIM, LINES)
            if _is_last(item, arrived, kv_head):
                merged = _merged(
                    item, partials, tl.load(facts + 1) * SHARE, kv_head, is_line, dims, dim_ok,
                    HEAD_DIM, LINES, DIMS, GROUP,
                )  # fmt: skip
                _store_results(merged, places, targets, HAS_SUMS, KEEP)
