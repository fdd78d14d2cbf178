"""Random steps of a few requests, as an engine sends them: chunks, and trees with their paths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from draftline.core.steps import StepInput

from ..tools.tiny_models import VOCAB_SIZE
from .steps import BLOCK_SIZE, PagedRequest, Rows, make_step

NUM_BLOCKS = 24


class Conversation:
    """One request of a random run: what is committed and cached, and its tree in flight."""

    def __init__(self, blocks: list[int], rng: np.random.Generator) -> None:
        self._request = PagedRequest(blocks, BLOCK_SIZE)
        self._rng = rng
        self._num_cached = 0

    def next_rows(self) -> tuple[Rows, np.ndarray]:
        """A chunk, or a tree of which a path is committed by the moves that come with it."""
        count = int(self._rng.integers(1, 6))
        tokens = self._rng.integers(2, VOCAB_SIZE, count).tolist()
        start = self._num_cached
        if start == 0 or self._rng.random() < 0.4:
            self._num_cached += count
            return self._request.chunk(tokens, start), np.empty((0, 2), dtype=np.int32)
        parents = [int(self._rng.integers(-1, node)) if node else -1 for node in range(count)]
        path = [count - 1]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        slots = self._request.slots(start, count)
        self._num_cached += len(path)
        moves = np.stack((slots[path], slots[: len(path)]), axis=1)
        return self._request.tree(tokens, parents, start), moves[moves[:, 0] != moves[:, 1]]


def random_steps(count: int, seed: int) -> Iterator[StepInput]:
    """Steps of up to three requests; their moves commit paths of the requests' last ones."""
    rng = np.random.default_rng(seed)
    blocks = np.split(rng.permutation(NUM_BLOCKS), 3)
    talks = [Conversation(own.tolist(), rng) for own in blocks]
    moves = [np.empty((0, 2), np.int32)] * len(talks)
    for _ in range(count):
        slots = [slot for slot in range(len(talks)) if rng.random() < 0.7] or [0]
        pairs = [talks[slot].next_rows() for slot in slots]
        step = make_step(
            [rows for rows, _ in pairs], moves=np.concatenate([moves[slot] for slot in slots])
        )
        yield replace(step, state_slots=np.array(slots, dtype=np.int32))
        for slot, (_, moved) in zip(slots, pairs, strict=True):
            moves[slot] = moved
