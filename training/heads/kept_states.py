"""A target's hidden states of texts, kept on disk from the first epoch for the later ones."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .target import HiddenStates


class _Kept(NamedTuple):
    """Where a text's states are in the file, bytes."""

    offset: int
    length: int


class KeptStates:
    """A `HiddenStates` that asks another one once for each text, in bfloat16.

    States are rounded the first time, too, so that every epoch reads the same. Texts for which the
    file has no room are computed again each time. The file is in the folder of temporary files and
    ends with the process.
    """

    def __init__(self, states: HiddenStates, max_bytes: int) -> None:
        self._states, self._max_bytes = states, max_bytes
        self._file, path = tempfile.mkstemp(prefix="draftline-states-")
        # Without a name it ends with the process, however that ends.
        Path(path).unlink()
        weakref.finalize(self, os.close, self._file)
        self._end = 0
        self._kept: dict[bytes, _Kept] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        """See `HiddenStates`."""
        return self._states.layers

    def launch(self, tokens: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        """See `HiddenStates`. Only texts that are not kept are computed."""
        ids = tokens.cpu().numpy()
        keys = [row[:length].tobytes() for row, length in zip(ids, lengths, strict=True)]
        missing = [row for row, key in enumerate(keys) if key not in self._kept]
        wait = None
        if missing:
            wait = self._states.launch(tokens[missing], [lengths[row] for row in missing])

        def states() -> Tensor:
            new = None if wait is None else wait().bfloat16()
            known = {row: self._read(keys[row]) for row in range(len(keys)) if row not in missing}
            some = next(iter(known.values())) if new is None else new
            found = some.new_zeros(*tokens.shape, some.shape[-1])
            for row, own in known.items():
                found[row, : len(own)] = own
            if new is not None:
                found[missing] = new
                for row in missing:
                    self._keep(keys[row], found[row, : lengths[row]])
            return found.float()

        return states

    def _read(self, key: bytes) -> Tensor:
        """bfloat16 [tokens, width] of a kept text."""
        kept = self._kept[key]
        tokens = len(key) // np.dtype(np.int64).itemsize
        content = bytearray(os.pread(self._file, kept.length, kept.offset))
        return torch.frombuffer(content, dtype=torch.bfloat16).view(tokens, -1)

    def _keep(self, key: bytes, states: Tensor) -> None:
        content = states.contiguous().cpu().view(torch.int16).numpy().tobytes()
        if key in self._kept or self._end + len(content) > self._max_bytes:
            return
        try:
            written = os.pwrite(self._file, content, self._end)
        except OSError:
            written = 0
        if written < len(content):
            # A full disk: what there is stays, and no more is kept.
            self._max_bytes = self._end
            return
        self._kept[key] = _Kept(self._end, len(content))
        self._end += len(content)
