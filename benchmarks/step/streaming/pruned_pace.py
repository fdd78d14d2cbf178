"""The pace of slices where stages leave rows out: it goes by what steps take in full."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.request.chosen import RowAnswer
from ....core.schedule.pace import SlicePace
from ....core.tree.streamed_tree import StreamedTree


class PrunedPace(SlicePace):
    """Learns nothing of steps that are answered sooner than steps are.

    In a simulation these are the ones that rows were left out of. The next slice will have all of
    its rows: if stages counted as quicker, it would go out before the first of them is free, knew
    less, and were more often in vain.
    """

    __slots__ = ()

    def answered(
        self, streams: Sequence[StreamedTree[RowAnswer]], num_rows: int, sent_at: float
    ) -> None:
        """See `SlicePace`."""
        if self._clock() - sent_at < self._seconds(num_rows):
            for stream in streams:
                stream.note_landing()
        else:
            super().answered(streams, num_rows, sent_at)
