"""A step's logit edits, as device tensors that are refilled in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Float32, Int32
from ...core.request.allowed_tokens import num_words
from ...core.steps import LogitEdits, Penalties
from ..device_tables import StagedBuffer

# Fields of a row: first and number of its biases, penalties and path; its row of `masks`, or -1;
# the edit that its penalties belong to.
ROW_FIELDS = 8
NO_EDIT = (0, 0, 0, 0, 0, 0, -1, 0)


@dataclass(frozen=True, slots=True)
class EditCapacity:
    """The largest edits that tables hold; numbers of all edits together."""

    num_rows: int
    num_edits: int
    num_biases: int
    num_tokens: int
    num_path: int
    num_masks: int

    @classmethod
    def of(cls, edits: Sequence[LogitEdits], num_rows: int) -> EditCapacity:
        """The capacity for these edits, each number rounded up to a power of two."""
        penalties = [edit.penalties for edit in edits if edit.penalties is not None]
        needed = (
            num_rows,
            len(edits),
            sum(len(edit.bias_tokens) for edit in edits),
            sum(len(each.tokens) for each in penalties),
            sum(len(each.path_rows) for each in penalties),
            sum(len(edit.mask) for edit in edits if edit.mask is not None),
        )
        return cls(*(1 << (number - 1).bit_length() if number else 1 for number in needed))


class EditTables:
    """The edits of one step after another; valid until the next `refill`. One copy to the device.

    rows         int32 [rows, ROW_FIELDS]
    bias_tokens  int32 [biases]; biases float32 [biases]
    factors      float32 [edits, 3]  repetition, frequency, presence
    tokens       int32 [tokens] that are penalised
    times        int32 [tokens]  twice the times in the answer, and 1 more if in the prompt
    path         int32 [path]    tokens on a row's path, by their place among the edit's
    masks        int32 [masks, words]  bits of the tokens that may be chosen

    Addresses never change, so that a CUDA graph can replay what reads them.
    """

    def __init__(self, capacity: EditCapacity, vocab_size: int, device: torch.device) -> None:
        self.capacity, self.vocab_size = capacity, vocab_size
        num_rows, num_edits, num_biases, num_tokens, num_path, num_masks = astuple(capacity)
        words = num_words(vocab_size)
        sizes = {
            "rows": num_rows * ROW_FIELDS, "bias_tokens": num_biases, "biases": num_biases,
            "factors": num_edits * 3, "tokens": num_tokens, "times": num_tokens,
            "path": num_path, "masks": num_masks * words,
        }  # fmt: skip
        self._sections = StagedBuffer.sections(sizes)
        self._buffer = StagedBuffer(self._sections["masks"].stop, device)
        self._host = self._buffer.next()
        self.rows = self._view("rows").view(-1, ROW_FIELDS)
        self.bias_tokens = self._view("bias_tokens")
        self.biases = self._view("biases").view(torch.float32)
        self.factors = self._view("factors").view(torch.float32).view(-1, 3)
        self.tokens, self.times, self.path = map(self._view, ("tokens", "times", "path"))
        self.masks = self._view("masks").view(-1, words)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._buffer.num_bytes

    def refill(self, edits: Sequence[LogitEdits]) -> None:
        """Fill the tables with these edits, which must fit; rows without one stay as they are."""
        self._host = self._buffer.next()
        penalties = [edit.penalties for edit in edits if edit.penalties is not None]
        self._put("rows", self._rows(edits))
        self._put("bias_tokens", *(edit.bias_tokens for edit in edits))
        self._put("biases", *(edit.bias.view(np.int32) for edit in edits))
        self._put("factors", _factors(edits).view(np.int32))
        self._put("tokens", *(each.tokens for each in penalties))
        self._put("times", *(2 * each.counts + each.in_prompt for each in penalties))
        self._put("path", *(each.path_tokens[_by_row(each)] for each in penalties))
        masks = [edit.mask.view(np.int32) for edit in edits if edit.mask is not None]
        used = self._put("masks", *masks)
        self._buffer.send(used)

    def _rows(self, edits: Iterable[LogitEdits]) -> Int32:
        rows = np.tile(np.array(NO_EDIT, dtype=np.int32), (self.capacity.num_rows, 1))
        biases = tokens = steps = masks = 0
        for index, edit in enumerate(edits):
            edit_rows = rows[edit.first_row : edit.first_row + edit.num_rows]
            edit_rows[:, 0:2] = biases, len(edit.bias_tokens)
            biases += len(edit.bias_tokens)
            edit_rows[:, 7] = index
            if edit.penalties is not None:
                edit_rows[:, 2:4] = tokens, len(edit.penalties.tokens)
                counts = np.bincount(edit.penalties.path_rows, minlength=len(edit_rows))
                edit_rows[:, 4] = steps + np.cumsum(counts) - counts
                edit_rows[:, 5] = counts
                tokens += len(edit.penalties.tokens)
                steps += len(edit.penalties.path_rows)
            if edit.mask is not None:
                # One for all rows, or one for each.
                edit_rows[:, 6] = masks + np.arange(len(edit_rows)) % len(edit.mask)
                masks += len(edit.mask)
        return rows

    def _put(self, name: str, *parts: np.ndarray) -> int:
        """Write a section's parts one after the other; returns the end of the used part."""
        end = self._sections[name].start
        for part in parts:
            first, end = end, end + part.size
            self._host[first:end] = part.ravel()
        assert end <= self._sections[name].stop
        return end

    def _view(self, name: str) -> Tensor:
        return self._buffer.device[self._sections[name]]


def _by_row(penalties: Penalties) -> np.ndarray:
    return np.argsort(penalties.path_rows, kind="stable")


def _factors(edits: Iterable[LogitEdits]) -> Float32:
    rows = [
        (1, 0, 0)
        if (each := edit.penalties) is None
        else (each.repetition, each.frequency, each.presence)
        for edit in edits
    ]
    return np.array(rows, dtype=np.float32)
