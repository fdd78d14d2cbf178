"""Changes to logits as differences, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ....core.arrays import Int32, UInt32
from ....core.steps import LogitEdits, Penalties
from .kept_edits import KeptEdits
from .kept_masks import ReceivedMasks, SentMasks
from .step_difference import EditChanges
from .typed_array import ends_of, expect, expect_flat, typed

AS_KEPT = NONE = -1
NUM_HEADS, MASK_ROWS = 9, 7

Arrays = list[NDArray[Any]]


@dataclass(slots=True, eq=False)
class _Parts:
    """The arrays of `EditChanges`, edit by edit."""

    heads: list[tuple[int, ...]] = field(default_factory=list)
    bias_tokens: Arrays = field(default_factory=list)
    bias: Arrays = field(default_factory=list)
    factors: Arrays = field(default_factory=list)
    count_places: Arrays = field(default_factory=list)
    tokens: Arrays = field(default_factory=list)
    counts: Arrays = field(default_factory=list)
    in_prompt: Arrays = field(default_factory=list)
    path_rows: Arrays = field(default_factory=list)
    path_tokens: Arrays = field(default_factory=list)


class SentEdits:
    """The sender's end: what the other end knows of each slot."""

    __slots__ = ("_kept", "_masks")

    def __init__(self) -> None:
        self._kept: defaultdict[int, KeptEdits] = defaultdict(KeptEdits)
        self._masks = SentMasks()

    def changes(self, edits: Sequence[LogitEdits], row_slots: Int32) -> EditChanges | None:
        """The edits of a step against what is kept; None without any.

        `row_slots` int32 [logits rows]  the slot of the request that each belongs to. Raises
        `TypeError` for edits that no step has.
        """
        if not edits:
            return None
        parts = _Parts()
        for edit in edits:
            if not 0 <= edit.first_row < len(row_slots):
                raise TypeError("edits are of no row")
            self._add(parts, edit, self._kept[int(row_slots[edit.first_row])])
        masks = self._masks.changes([edit.mask for edit in edits if edit.mask is not None])
        return EditChanges(
            np.array(parts.heads, dtype=np.int32),
            _joined(parts.bias_tokens, np.int32), _joined(parts.bias, np.float32),
            _joined(parts.factors, np.float64), _joined(parts.count_places, np.int32),
            _joined(parts.tokens, np.int32), _joined(parts.counts, np.int32),
            _joined(parts.in_prompt, np.bool_), _joined(parts.path_rows, np.int32),
            _joined(parts.path_tokens, np.int32), masks,
        )  # fmt: skip

    def _add(self, parts: _Parts, edit: LogitEdits, kept: KeptEdits) -> None:
        num_biases = AS_KEPT
        if not _same(kept.bias_tokens, edit.bias_tokens) or not _same(kept.bias, edit.bias):
            kept.bias_tokens = typed(edit.bias_tokens, np.int32, 1, "bias tokens")
            kept.bias = typed(edit.bias, np.float32, 1, "bias")
            num_biases = len(kept.bias)
            parts.bias_tokens.append(kept.bias_tokens)
            parts.bias.append(kept.bias)
            if len(kept.bias_tokens) != num_biases:
                raise TypeError("tokens have no bias")
        penalties, num_masks = edit.penalties, NONE if edit.mask is None else len(edit.mask)
        head = (NONE, 0, 0, 0) if penalties is None else self._penalties(parts, penalties, kept)
        has_factors = penalties is not None and _has_new_factors(parts, penalties, kept)
        parts.heads.append(
            (edit.first_row, edit.num_rows, num_biases, *head, num_masks, has_factors)
        )

    @staticmethod
    def _penalties(
        parts: _Parts, penalties: Penalties, kept: KeptEdits
    ) -> tuple[int, int, int, int]:
        num_kept, places = kept.num_kept(penalties)
        tail = slice(num_kept, None)
        counts, in_prompt = penalties.counts, penalties.in_prompt
        parts.tokens.append(penalties.tokens[tail])
        parts.count_places.append(places)
        parts.counts += (counts[places], counts[tail])
        parts.in_prompt += (in_prompt[places], in_prompt[tail])
        kept.counts[places], kept.in_prompt[places] = counts[places], in_prompt[places]
        kept.put_tail(num_kept, penalties.tokens[tail], counts[tail], in_prompt[tail])
        parts.path_rows.append(typed(penalties.path_rows, np.int32, 1, "path rows"))
        parts.path_tokens.append(typed(penalties.path_tokens, np.int32, 1, "path tokens"))
        if len(penalties.path_rows) != len(penalties.path_tokens):
            raise TypeError("a path has rows without a token")
        return len(penalties.tokens), num_kept, len(places), len(penalties.path_rows)


class ReceivedEdits:
    """The receiver's end."""

    __slots__ = ("_kept", "_masks")

    def __init__(self) -> None:
        self._kept: defaultdict[int, KeptEdits] = defaultdict(KeptEdits)
        self._masks = ReceivedMasks()

    def apply(self, changes: EditChanges | None, row_slots: Int32) -> tuple[LogitEdits, ...]:
        """The edits that the other end's `changes` was given.

        The tokens of their penalties are the kept ones, which the next call changes. Raises
        `ProtocolError` for what the other end cannot have made.
        """
        if changes is None:
            return ()
        heads = changes.heads
        expect(heads.ndim == 2 and heads.shape[1] == NUM_HEADS, "edits have no heads")
        num_masks = heads[:, MASK_ROWS]
        is_masked = num_masks != NONE
        expect(is_masked.any() == (changes.masks is not None), "edits have no masks")
        masks = iter(
            () if changes.masks is None else self._masks.apply(changes.masks, num_masks[is_masked])
        )
        edits = []
        for head, *parts in zip(heads.tolist(), *_parts_of(changes), strict=True):
            expect(0 <= head[0] < len(row_slots), "edits are of no row")
            kept = self._kept[int(row_slots[head[0]])]
            mask = None if head[MASK_ROWS] == NONE else next(masks)
            edits.append(_applied(kept, head, parts, mask))
        return tuple(edits)


def _parts_of(changes: EditChanges) -> Iterator[Arrays]:
    """The arrays of every edit, field by field as in `_Parts`."""
    heads = changes.heads
    num_biases = np.maximum(heads[:, 2], 0)
    num_new = np.where(heads[:, 3] == NONE, 0, heads[:, 3] - heads[:, 4])
    lengths = {
        "bias_tokens": num_biases, "bias": num_biases, "factors": 3 * heads[:, 8],
        "count_places": heads[:, 5], "tokens": num_new, "counts": heads[:, 5] + num_new,
        "in_prompt": heads[:, 5] + num_new, "path_rows": heads[:, 6], "path_tokens": heads[:, 6],
    }  # fmt: skip
    for name, own in lengths.items():
        array = getattr(changes, name)
        expect_flat(name, array)
        ends = ends_of(own, len(array), name)
        yield [array[first:end] for first, end in zip([0, *ends], ends, strict=False)]


def _applied(kept: KeptEdits, head: list[int], parts: Arrays, mask: UInt32 | None) -> LogitEdits:
    """One edit, which is kept from now on."""
    first_row, num_rows, num_biases, num_tokens, num_kept, num_changed, *_ = head
    bias_tokens, bias, factors, places, tokens, counts, in_prompt, path_rows, path_tokens = parts
    if num_biases != AS_KEPT:
        kept.bias_tokens, kept.bias = bias_tokens, bias
    if len(factors):
        kept.factors = factors
    penalties = None
    if num_tokens != NONE:
        expect(0 <= num_kept <= kept.num_tokens, "tokens are not known here")
        if num_changed:
            expect(places.min() >= 0 and places.max() < num_kept, "counts are of no token")
        kept.counts[places], kept.in_prompt[places] = counts[:num_changed], in_prompt[:num_changed]
        kept.put_tail(num_kept, tokens, counts[num_changed:], in_prompt[num_changed:])
        penalties = Penalties(*kept.text, path_rows, path_tokens, *kept.factors.tolist())
    return LogitEdits(first_row, num_rows, kept.bias_tokens, kept.bias, penalties, mask)


def _has_new_factors(parts: _Parts, penalties: Penalties, kept: KeptEdits) -> bool:
    own = np.array((penalties.repetition, penalties.presence, penalties.frequency), np.float64)
    if _same(own, kept.factors):
        return False
    kept.factors = own
    parts.factors.append(own)
    return True


def _same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Whether they are equal bit by bit."""
    return left is right or (left.dtype == right.dtype and left.tobytes() == right.tobytes())


def _joined(parts: Arrays, dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
