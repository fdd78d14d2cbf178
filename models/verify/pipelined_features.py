"""The heads' input for requests with pipelined trees: the committed rows of each from the root of
its newest tree chunk on. Most of them were computed with earlier chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Int32
from ...core.pipelined.walk import ChunkWalk, PipelinedWalks
from ...core.steps import StepInput


class PipelinedRows(NamedTuple):
    """An accepted path through a tree chunk, and the features float32 [rows, width] of its rows."""

    walk: ChunkWalk
    features: Tensor


class PipelinedFeatures:
    """Keeps the features of rows of pipelined trees from chunk to chunk."""

    def __init__(self) -> None:
        self._features: dict[int, Tensor] = {}
        self._walks = PipelinedWalks(self._features.pop)

    def clear(self) -> None:
        """Drop the features of all requests."""
        self._walks.clear()
        self._features.clear()

    def move(self, moves: Int32) -> None:
        """KV was copied between slots, int32 [m, 2] (from, to)."""
        self._walks.move(moves)

    def follow(
        self,
        step: StepInput,
        target_tokens: Int32,
        features: Callable[[Int32], Tensor],
    ) -> dict[int, PipelinedRows]:
        """The rows of the step's pipelined requests, by place.

        features  float32 [n, width] of rows int32 [n] of the step
        """
        found = {}
        for place in step.heads.chunk_requests:
            key, walk = step.request_keys[place], self._walks.follow(step, place, target_tokens)
            rows = list(walk.walked)
            if not walk.num_known:
                rows.insert(0, int(step.request_starts[place]))
            new = features(np.array(rows, dtype=np.int32))
            if walk.num_known:
                new = torch.cat([self._features[key][walk.num_passed :], new])
            self._features[key] = new
            found[place] = PipelinedRows(walk, new)
        return found
