"""A request's text as a head knows it: what it keeps of it, and features that it has not read.

Rows of a path behind the text are read from the head's own outputs: the target has not confirmed
the path's tokens, so there are no features of them yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Float32, Int32
from ...core.proposals import DraftRequest, FeatureRows
from ..model.stopping_rules import num_equal
from ..model.text_distribution import TextDistribution
from .networks.head_network import FeatureNetwork
from .networks.kept_keys import KeptKeys

# A Python number and a place in a list.
TOKEN_BYTES = 36


class KeysBehind(KeptKeys):
    """Keys and values of a text, which stay its own, and of rows behind it."""

    __slots__ = ("_num_layers", "_own", "_text")

    def __init__(self, text: KeptKeys, num_layers: int) -> None:
        super().__init__(0)
        self._text, self._num_layers = text, num_layers
        self._own = KeptKeys(num_layers)
        self.num_rows = text.num_rows

    @property
    def num_bytes(self) -> int:
        """Of the rows behind the text."""
        return self._own.num_bytes

    def layer(self, index: int) -> Tensor | None:
        """[sides, num_rows, kv_heads, head_dim]; None where there is nothing."""
        self._own.num_rows = self.num_rows - self._text.num_rows
        own = self._own.layer(index)
        return self._text.layer(index) if own is None else self._joined(index, own)

    def append(self, index: int, own: Tensor) -> Tensor:
        """As of `KeptKeys`."""
        self._own.num_rows = self.num_rows - self._text.num_rows
        return self._joined(index, self._own.append(index, own))

    def _rooms(self) -> list[Tensor | None]:
        return [self.layer(index) for index in range(self._num_layers)]

    def _joined(self, index: int, own: Tensor) -> Tensor:
        before = self._text.layer(index)
        return own if before is None else torch.cat([before, own], dim=1)


class PathRows:
    """Tokens of a path that were read, and the keys, values and outputs of their rows."""

    __slots__ = ("_text", "kept", "outputs", "tokens")

    def __init__(self, text: KeptKeys, last: Tensor, num_layers: int) -> None:
        """`last`: output of the text's last row, [1, width]."""
        self._text = text
        self.kept = KeysBehind(text, num_layers)
        self.tokens: list[int] = []
        # Of the text's last row, and of each of these.
        self.outputs = [last]

    def follow(self, path: Sequence[int]) -> None:
        """Let go of what is not on this path."""
        count = num_equal(self.tokens, path)
        del self.tokens[count:]
        del self.outputs[count + 1 :]
        self.kept.keep_first(self._text.num_rows + count)


class PathRead(NamedTuple):
    """A path to be read, from where its rows end, behind a text of `length` tokens."""

    rows: PathRows
    path: Sequence[int]
    length: int


def read_paths(
    network: FeatureNetwork, walks: Sequence[PathRead], is_over: Callable[[], bool]
) -> Iterator[None]:
    """Read a token of each path a pass, until all are read or it `is_over`; yields after each."""
    for walk in walks:
        walk.rows.follow(walk.path)
    while active := [walk for walk in walks if len(walk.rows.tokens) < len(walk.path)]:
        if is_over():
            return
        tokens = [walk.path[len(walk.rows.tokens)] for walk in active]
        # As of nodes: a row stands where the feature does that it has in place of the target's.
        positions = [walk.length - 1 + len(walk.rows.tokens) for walk in active]
        outputs = network.read(
            network.regress(torch.cat([walk.rows.outputs[-1] for walk in active])),
            torch.tensor(tokens, device=network.device),
            torch.tensor(positions, device=network.device),
            [walk.rows.kept for walk in active],
            [1] * len(active),
        )
        for walk, token, own in zip(active, tokens, outputs.split(1), strict=True):
            walk.rows.tokens.append(token)
            walk.rows.outputs.append(own)
        yield


class HeadText:
    """The committed tokens of a request, and what a head has made of the target's features of them.

    Row i of the head reads the feature of token i and token i + 1. Features that were not
    requested are missing: later rows do not attend to those tokens.

    kept          keys and values of the rows so far
    next_position  rows before it are kept or were left out
    last          output of the last row, [1, width]; None: the last token but one has no row
    path          rows of a path behind the text, which were read last
    distribution  how the token after the text is chosen
    """

    __slots__ = ("_features", "_vocab_size",
                 "distribution", "is_draftable", "kept", "last", "next_position",
                 "path", "tokens")  # fmt: skip

    def __init__(self, request: DraftRequest, vocab_size: int, num_layers: int) -> None:
        self.tokens: list[int] = request.token_ids.tolist()
        self.distribution = TextDistribution.of(request, vocab_size)
        self.kept = KeptKeys(num_layers)
        self.next_position = 0
        self.last: Tensor | None = None
        self.path: PathRows | None = None
        self._vocab_size = vocab_size
        self.is_draftable = self.distribution.has_choice and self.knows(request.token_ids)
        self._features: deque[FeatureRows] = deque()

    @property
    def committed_len(self) -> int:
        """Tokens of the text."""
        return len(self.tokens)

    @property
    def memory_bytes(self) -> int:
        """Bytes of its tokens, of keys and values, and of features that wait."""
        waiting = sum(rows.values.nbytes for rows in list(self._features))
        path = self.path
        kept = self.kept.num_bytes + (0 if path is None else path.kept.num_bytes)
        return len(self.tokens) * TOKEN_BYTES + kept + waiting

    def extend(self, tokens: Int32) -> None:
        """Append committed tokens."""
        self.is_draftable &= self.knows(tokens)
        added = tokens.tolist()
        self.tokens.extend(added)
        self.distribution.append(added)
        self.last = self.path = None

    def add_features(self, rows: FeatureRows) -> None:
        """Keep features for `take_features`; those of rows that were computed already are left."""
        if rows.position + len(rows.values) > self.next_position:
            self._features.append(rows)

    def take_features(self) -> tuple[Float32, Int32, Int32] | None:
        """Features [n, width] that wait, the tokens behind theirs and their positions, int32 [n].

        None where there are none.
        """
        values, positions = [], []
        while self._features:
            rows = self._features.popleft()
            first = max(rows.position, self.next_position)
            # The token behind the last one is not known before its commit.
            end = min(rows.position + len(rows.values), self.committed_len - 1)
            if first < end:
                values.append(rows.values[first - rows.position : end - rows.position])
                positions.append(np.arange(first, end, dtype=np.int32))
                self.next_position = end
        if not values:
            return None
        where = np.concatenate(positions)
        behind = np.array([self.tokens[position + 1] for position in where], dtype=np.int32)
        return np.concatenate(values), behind, where

    def note_rows(self, last: Tensor, max_rows: int) -> None:
        """`last` is the newest row's output; at most `max_rows` are kept, or half of them."""
        self.path = None
        if self.next_position == self.committed_len - 1:
            self.last = last
        if self.kept.num_rows > max_rows:
            self.kept.drop_oldest(self.kept.num_rows - max_rows // 2)

    def knows(self, tokens: Int32) -> bool:
        """Whether there are embeddings for all; a wrong index can end a process on a GPU."""
        return bool(np.all((tokens >= 0) & (tokens < self._vocab_size)))
