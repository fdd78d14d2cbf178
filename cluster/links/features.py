"""The target's features on their way to a drafter: of its own layers, in 16 bits, in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.arrays import Float32, UInt16
from ...core.errors import DrafterError
from ...core.proposals import FeatureLayers, FeatureRows

# Of features in one message, as they travel; more go before it, in messages of their own.
PIECE_BYTES = 4 * 2**20
# Of all that wait for one answer. Rows above that are left out, the oldest of each request first.
MAX_FEATURE_BYTES = 256 * 2**20
NUMBER_BYTES = 2
# Half of what the lower 16 bits of a float count, which is rounded up if the upper ones are odd.
HALF, QUIET_NAN = np.uint32(0x7FFF), np.uint32(0x7FC00000)


@dataclass(frozen=True, slots=True)
class FeatureColumns:
    """The layers that a drafter reads, among those that the target returns, in the drafter's order.

    places  of its layers among those that are handed out
    given   what is handed out
    """

    places: tuple[int, ...]
    given: FeatureLayers

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's features on the wire."""
        return len(self.places) * self.given.width * NUMBER_BYTES

    def of(self, rows: FeatureRows) -> FeatureRows:
        """The rows as the drafter reads them; the same object where it reads all."""
        if self.places == tuple(range(len(self.given.layers))):
            return rows
        parts = rows.values.reshape(len(rows.values), len(self.given.layers), self.given.width)
        own = parts[:, list(self.places)].reshape(len(parts), -1)
        return rows._replace(values=own)


def feature_columns(given: FeatureLayers | None, read: FeatureLayers | None) -> FeatureColumns:
    """The columns that a drafter reads of what is handed out to it.

    Raises `DrafterError`, which names the setting, if it reads what is not handed out, or nothing.
    """
    if read is None:
        raise DrafterError(
            "kind: is head, and the server's drafter reads no states of the target; name the "
            "address of a head's server"
        )
    if given is None:
        raise DrafterError(
            f"kind: the server's drafter reads states of the target's {read}, which only a head is "
            "given; set kind: head, and model as at the server"
        )
    if read.width != given.width or not set(read.layers) <= set(given.layers):
        raise DrafterError(
            f"model: the server's head reads {read}, and the target returns {given}; set model "
            "to the folder that the server was started with"
        )
    return FeatureColumns(tuple(map(given.layers.index, read.layers)), given)


def feature_bytes(rows: Iterable[FeatureRows]) -> int:
    """Bytes of features on the wire, without what is said about them."""
    return sum(own.values.size for own in rows) * NUMBER_BYTES


def newest(rows: Sequence[FeatureRows], most_bytes: int) -> Sequence[FeatureRows]:
    """Those that fit in `most_bytes`: of each request its newest, the same share for all."""
    if feature_bytes(rows) <= most_bytes:
        return rows
    room = dict.fromkeys((own.request_id for own in rows), 0)
    room = dict.fromkeys(room, most_bytes // len(room))
    kept: list[FeatureRows] = []
    for own in reversed(rows):
        row_bytes = own.values.shape[1] * NUMBER_BYTES
        count = min(len(own.values), room[own.request_id] // row_bytes)
        room[own.request_id] -= count * row_bytes
        if count:
            kept.append(_part(own, len(own.values) - count, len(own.values)))
    return kept[::-1]


def pieces(rows: Iterable[FeatureRows], most_bytes: int) -> list[list[FeatureRows]]:
    """All rows in order, in pieces of at most `most_bytes` each, but of one row at least."""
    found: list[list[FeatureRows]] = [[]]
    left = most_bytes
    for own in rows:
        row_bytes = own.values.shape[1] * NUMBER_BYTES
        first = 0
        while first < len(own.values):
            if left < row_bytes and found[-1]:
                found.append([])
                left = most_bytes
            end = min(len(own.values), first + max(1, left // row_bytes))
            found[-1].append(_part(own, first, end))
            left -= (end - first) * row_bytes
            first = end
    return found


def _part(rows: FeatureRows, first: int, end: int) -> FeatureRows:
    if end - first == len(rows.values):
        return rows
    return rows._replace(position=rows.position + first, values=rows.values[first:end])


def to_bfloat16(values: Float32) -> UInt16:
    """The upper halves of floats, rounded to the nearest, to even where two are as near."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (HALF + ((bits >> 16) & 1))
    unknown = np.isnan(values)
    # Rounded like a number, one could become an infinity or a zero.
    if unknown.any():
        rounded[unknown] = QUIET_NAN
    return (rounded >> 16).astype(np.uint16)


def from_bfloat16(halves: UInt16) -> Float32:
    """Floats whose upper halves these are; the lower ones are 0."""
    return (halves.astype(np.uint32) << 16).view(np.float32)
