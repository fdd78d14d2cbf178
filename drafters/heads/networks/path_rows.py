"""Rows of a path behind a text, which a head reads from what it said itself.

The target has not confirmed the path's tokens, so there are no features of them yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...model.stopping.chain_length import num_equal
from .head_network import FeatureNetwork
from .kept_keys import KeptKeys


class KeysBehind(KeptKeys):
    """Keys and values of a text, which stay its own, and of rows behind it."""

    __slots__ = ("_own", "_text")

    def __init__(self, text: KeptKeys, num_layers: int) -> None:
        super().__init__(0)
        self._text = text
        self._own = KeptKeys(num_layers)
        self.num_rows = text.num_rows

    @property
    def num_bytes(self) -> int:
        """Of the rows behind the text."""
        return self._own.num_bytes

    def layer(self, index: int) -> Tensor | None:
        """[2, num_rows, kv_heads, head_dim]; None where there is nothing."""
        self._own.num_rows = self.num_rows - self._text.num_rows
        own = self._own.layer(index)
        return self._text.layer(index) if own is None else self._joined(index, own)

    def append(self, index: int, keys: Tensor, values: Tensor) -> Tensor:
        """As of `KeptKeys`."""
        self._own.num_rows = self.num_rows - self._text.num_rows
        return self._joined(index, self._own.append(index, keys, values))

    def _joined(self, index: int, own: Tensor) -> Tensor:
        before = self._text.layer(index)
        return own if before is None else torch.cat([before, own], dim=1)


class PathRows:
    """Tokens of a path that were read, the keys and values of their rows, and what these said."""

    __slots__ = ("_text", "kept", "said", "tokens")

    def __init__(self, text: KeptKeys, last: Tensor, num_layers: int) -> None:
        """`last`: what the text's last row said, [1, width]."""
        self._text = text
        self.kept = KeysBehind(text, num_layers)
        self.tokens: list[int] = []
        # Of the text's last row, and of each of these.
        self.said = [last]

    def follow(self, path: Sequence[int]) -> None:
        """Let go of what is not on this path."""
        count = num_equal(self.tokens, path)
        del self.tokens[count:]
        del self.said[count + 1 :]
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
        said = network.read(
            network.regress(torch.cat([walk.rows.said[-1] for walk in active])),
            torch.tensor(tokens, device=network.device),
            torch.tensor(positions, device=network.device),
            [walk.rows.kept for walk in active],
            [1] * len(active),
        )
        for walk, token, own in zip(active, tokens, said.split(1), strict=True):
            walk.rows.tokens.append(token)
            walk.rows.said.append(own)
        yield
