"""Compiled loops over what a head knows of KV slots (`waiting_rows.py`), all requests in one call.

states  int32 [slots]   READ, UNKNOWN, or the place where the features of its token wait
owners  int32 [places]  the slot of each place, -1 where nothing waits; the states' inverse
"""

from __future__ import annotations

import numpy as np

from ...core.arrays import Bool, Int32
from ...core.compiled import compiled
from ...core.step.builder import kv_slot

READ, UNKNOWN = -1, -2


@compiled
def set_states(states: Int32, owners: Int32, slots: Int32, state: int) -> None:
    """Slots int32 [n] are READ or UNKNOWN now; nothing of them waits any more."""
    for slot in slots:
        if states[slot] >= 0:
            owners[states[slot]] = -1
        states[slot] = state


@compiled
def move_states(states: Int32, owners: Int32, moves: Int32) -> None:
    """Slots int32 [m, 2] (from, to) were copied, all read before one was written.

    What waits goes along: it has one owner.
    """
    moved = np.empty(len(moves), dtype=np.int32)
    for index in range(len(moves)):
        source = moves[index, 0]
        moved[index] = states[source]
        if moved[index] >= 0:
            states[source] = UNKNOWN
    for index in range(len(moves)):
        target = moves[index, 1]
        if states[target] >= 0:
            owners[states[target]] = -1
        states[target] = moved[index]
        if moved[index] >= 0:
            owners[moved[index]] = target


@compiled
def take_places(states: Int32, owners: Int32, first: int, slots: Int32) -> Int32:
    """Places int32 [n] for the features of slots int32 [n], no slot twice, from place `first` on;
    who waited there is let go. At most as many slots as places."""
    places = np.empty(len(slots), dtype=np.int32)
    for index in range(len(slots)):
        place, slot = (first + index) % len(owners), slots[index]
        if owners[place] >= 0:
            states[owners[place]] = UNKNOWN
        if states[slot] >= 0:
            owners[states[slot]] = -1
        places[index] = states[slot] = place
        owners[place] = slot
    return places


@compiled
def newest_rows(starts: Int32, is_wanted: Bool, most: int) -> Int32:
    """int32 [n]: the last rows, at most `most`, of each request that is not wanted; the rows of
    request r are starts[r]:starts[r+1]."""
    rows = np.empty(starts[-1], dtype=np.int32)
    count = 0
    for request in range(len(is_wanted)):
        if not is_wanted[request]:
            for row in range(max(starts[request], starts[request + 1] - most), starts[request + 1]):
                rows[count] = row
                count += 1
    return rows[:count]


@compiled
def lay_out_texts(  # noqa: PLR0913, PLR0917 - flat arrays, and one loop over them
    states: Int32,
    ring_following: Int32,
    tables: Int32,
    ends: Int32,
    requests: Int32,
    starts: Int32,
    slots: Int32,
    positions: Int32,
    following: Int32,
    block_size: int,
    max_tokens: int,
    most_late: int,
) -> tuple[Int32, Int32, Int32, Int32, Int32, Int32]:
    """The fields of `TextsToRead` of requests int32 [texts].

    ring_following  int32 [places]  the tokens behind those whose features wait
    tables, ends    block tables and context lengths of the step's requests
    starts, slots, positions, following  of the rows that come now, as in `TextRows`
    max_tokens      of a context that are looked at, the last ones
    most_late       of what waits of a text that is read, the last ones
    """
    size = 0
    for request in requests:
        size += min(ends[request], max_tokens) + starts[request + 1] - starts[request]
    placed, read = np.empty(size, dtype=np.int32), np.empty((3, size), dtype=np.int32)
    text_starts = np.zeros(len(requests) + 1, dtype=np.int32)
    num_known = np.empty(len(requests), dtype=np.int32)
    count, num_read = 0, 0
    for text in range(len(requests)):
        request, first_read = requests[text], num_read
        table, end = tables[request], int(ends[request])
        count, after = _known(states, table, end, block_size, max_tokens, placed, count)
        num_known[text] = count - text_starts[text]
        skipped = _num_waiting(states, table, after, end, block_size) - most_late
        for position in range(after, end):
            slot = kv_slot(table, position, block_size)
            if states[slot] >= 0:
                skipped -= 1
                if skipped < 0:
                    placed[count + num_read - first_read] = slot
                    read[0, num_read] = states[slot]
                    read[1, num_read] = ring_following[states[slot]]
                    read[2, num_read] = position
                    num_read += 1
        for row in range(starts[request], starts[request + 1]):
            placed[count + num_read - first_read] = slots[row]
            read[0, num_read] = -1 - row
            read[1, num_read], read[2, num_read] = following[row], positions[row]
            num_read += 1
        count += num_read - first_read
        text_starts[text + 1] = count
    sources, behind, where = read[0, :num_read], read[1, :num_read], read[2, :num_read]
    return placed[:count], text_starts, num_known, sources, behind, where


@compiled
def _known(
    states: Int32,
    table: Int32,
    end: int,
    block_size: int,
    max_tokens: int,
    placed: Int32,
    count: int,
) -> tuple[int, int]:
    """Place a text's slots that were read behind `count` others: how many there are then, and the
    position behind the last of them."""
    after = max(0, end - max_tokens)
    for position in range(after, end):
        slot = kv_slot(table, position, block_size)
        if states[slot] == READ:
            placed[count] = slot
            count += 1
            after = position + 1
    return count, after


@compiled
def _num_waiting(states: Int32, table: Int32, first: int, end: int, block_size: int) -> int:
    count = 0
    for position in range(first, end):
        count += states[kv_slot(table, position, block_size)] >= 0
    return count
