"""Builds `StepInput` by hand, for tests of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from draftline.core.arrays import Int32
from draftline.core.steps import (
    NO_LOG_PROBS,
    NO_PROBES,
    LogProbInput,
    ProbeInput,
    SamplingRows,
    StepInput,
    TreeRows,
)
from draftline.core.tree.tree import pack

BLOCK_SIZE = 4
NONE = np.empty(0, dtype=np.int32)


def int32(values: object) -> Int32:
    return np.asarray(values, dtype=np.int32)


@dataclass(frozen=True)
class Rows:
    """One request's rows in a step; `tree` is None for a chunk of known tokens."""

    blocks: Sequence[int]
    tokens: Int32
    positions: Int32
    slots: Int32
    context_len: int
    tree: TreeRows | None = None


@dataclass(frozen=True)
class PagedRequest:
    """Where one request's tokens live: `blocks` in the order of its positions."""

    blocks: Sequence[int]
    block_size: int = BLOCK_SIZE

    def slots(self, first: int, count: int) -> Int32:
        positions = np.arange(first, first + count)
        first_slots = int32(self.blocks)[positions // self.block_size] * self.block_size
        return first_slots + int32(positions % self.block_size)

    def chunk(self, tokens: Sequence[int], start: int) -> Rows:
        """Known tokens at the positions from `start` on."""
        count = len(tokens)
        positions = np.arange(start, start + count, dtype=np.int32)
        return Rows(self.blocks, int32(tokens), positions, self.slots(start, count), start)

    def tree(
        self, tokens: Sequence[int], parents: Sequence[int], start: int, in_flight: int = 0
    ) -> Rows:
        """Nodes below a context of `start` tokens, in scratch slots that follow it.

        The first `in_flight` nodes were rows of an earlier step: they are columns only.
        """
        count = len(tokens)
        mask = np.eye(count, dtype=np.bool_)
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        positions = int32(start + mask.sum(axis=1) - 1)
        slots = self.slots(start, count)
        own = slice(in_flight, None)
        return Rows(
            self.blocks, int32(tokens)[own], positions[own], slots[own], start,
            TreeRows(pack(mask[own]), slots, positions),
        )  # fmt: skip


def make_step(
    requests: Sequence[Rows], *, moves: object = (), logits_rows: object = None,
    probe_rows: object = NONE, probe_top_k: int = 0,
    scored_rows: object = NONE, scored_tokens: object = NONE, step_id: int = 0,
) -> StepInput:  # fmt: skip
    """A step of these rows; every row gets a greedy token unless `logits_rows` says which."""
    counts = [len(rows.tokens) for rows in requests]
    chosen = int32(np.arange(sum(counts)) if logits_rows is None else logits_rows)
    tables = np.zeros((len(requests), max((len(r.blocks) for r in requests), default=0)), np.int32)
    for table, rows in zip(tables, requests, strict=True):
        table[: len(rows.blocks)] = rows.blocks

    scored, probes = int32(scored_rows), int32(probe_rows)

    def joined(name: str) -> Int32:
        return np.concatenate([NONE, *(getattr(rows, name) for rows in requests)])

    return StepInput(
        step_id=step_id,
        moves=int32(moves).reshape(-1, 2),
        token_ids=joined("tokens"),
        positions=joined("positions"),
        slots=joined("slots"),
        request_starts=int32([0, *np.cumsum(counts, dtype=np.int32)]),
        context_lens=int32([rows.context_len for rows in requests]),
        block_tables=tables,
        trees=tuple(rows.tree for rows in requests),
        logits_rows=chosen,
        sampling=SamplingRows.greedy(np.zeros(len(chosen), dtype=np.int64)),
        log_probs=LogProbInput(scored_rows=scored, scored_tokens=int32(scored_tokens))
        if len(scored)
        else NO_LOG_PROBS,
        probes=ProbeInput(probes, probe_top_k) if len(probes) else NO_PROBES,
        state_slots=np.arange(len(requests), dtype=np.int32),
    )
