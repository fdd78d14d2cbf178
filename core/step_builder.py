"""Turns a plan of prompt chunks and token trees into the flat arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .edit_builder import build_edits
from .request import RequestState
from .sampling_params import SamplingParams
from .tree import NO_TREE, TokenTree
from .types import (
    Bool,
    Float32,
    Int32,
    Int64,
    LogitEdits,
    Probe,
    SamplingRows,
    StepInput,
    TreeRows,
)

NO_ROWS = np.empty(0, dtype=np.int32)
FIRST_ROW = np.zeros(1, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunk:
    """Positions `start` to `end` of a request, to be cached.

    wants_token  it is the last chunk of a prompt, which asks for the first token
    """

    state: RequestState
    start: int
    end: int
    wants_token: bool

    @property
    def num_scored(self) -> int:
        """Rows, from the first on, whose next token's log-probability is wanted."""
        state = self.state
        if state.prompt_log_probs is None or state.has_answer:
            return 0
        return max(0, min(self.end, state.prompt_len - 1) - self.start)


@dataclass(frozen=True, slots=True, eq=False)
class TreeStep:
    """The root, the tree and the probes of a decoding request, by source.

    offered  the tree before the budget cut it, to learn from
    """

    state: RequestState
    tree: TokenTree
    probes: dict[str, Probe]
    offered: TokenTree

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return 1 + len(self.tree) + sum(len(probe.tokens) for probe in self.probes.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of one request; `logits` and `probe` count from the request's first row.

    scored_tokens  of its first rows, the tokens whose log-probabilities are wanted
    """

    state: RequestState
    token_ids: Int32
    positions: Int32
    slots: Int32
    context_len: int
    tree: TreeRows | None
    nodes: TokenTree
    logits: Int32
    chosen_positions: Int64
    probe: Int32
    scored_tokens: Int32


def slots_of(blocks: Sequence[int], first: int, count: int, block_size: int) -> Int32:
    """KV slots of positions `first` to `first + count` of a request with these blocks."""
    first_block, offset = divmod(first, block_size)
    last_block = (first + count - 1) // block_size
    table = np.array(blocks[first_block : last_block + 1], dtype=np.int32) * block_size
    slots = table[:, None] + np.arange(block_size, dtype=np.int32)
    return slots.ravel()[offset : offset + count]


def build_step(
    step_id: int, chunks: Sequence[PromptChunk], trees: Sequence[TreeStep], block_size: int
) -> StepInput:
    """One step of all the given chunks and trees; trees come first.

    Rows of a tree step: root, nodes in tree order, probe rows by source. Takes the KV moves that
    the requests' last commits left.
    """
    rows = [_tree_rows(tree, block_size) for tree in trees]
    rows += [_chunk_rows(chunk, block_size) for chunk in chunks]
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(r.token_ids) for r in rows], out=starts[1:])
    logits_rows = np.concatenate([r.logits + s for r, s in zip(rows, starts, strict=False)])
    probe_rows = np.concatenate([r.probe + s for r, s in zip(rows, starts, strict=False)])
    probes = [probe for tree in trees for probe in tree.probes.values()]
    scored = [s + np.arange(len(r.scored_tokens)) for r, s in zip(rows, starts, strict=False)]
    params = [r.state.request.params for r in rows]
    return StepInput(
        step_id=step_id,
        moves=_take_moves(rows),
        token_ids=np.concatenate([r.token_ids for r in rows]),
        positions=np.concatenate([r.positions for r in rows]),
        slots=np.concatenate([r.slots for r in rows]),
        request_starts=starts,
        context_lens=np.array([r.context_len for r in rows], dtype=np.int32),
        block_tables=_block_tables(rows),
        trees=tuple(r.tree for r in rows),
        logits_rows=logits_rows.astype(np.int32),
        sampling=_sampling(rows),
        probe_rows=probe_rows.astype(np.int32),
        probe_top_k=max((probe.top_k for probe in probes), default=0),
        scored_rows=np.concatenate(scored).astype(np.int32),
        scored_tokens=np.concatenate([r.scored_tokens for r in rows]),
        with_log_probs=any(one.logprobs is not None for one in params),
        edits=_edits(rows),
        num_top=max(max(one.logprobs or 0, one.prompt_logprobs or 0) for one in params),
    )


def _chunk_rows(chunk: PromptChunk, block_size: int) -> _Rows:
    state, count = chunk.state, chunk.end - chunk.start
    logits = np.array([count - 1] if chunk.wants_token else [], dtype=np.int32)
    return _Rows(
        state=state,
        token_ids=np.array(state.token_ids[chunk.start : chunk.end], dtype=np.int32),
        positions=np.arange(chunk.start, chunk.end, dtype=np.int32),
        slots=slots_of(state.blocks, chunk.start, count, block_size),
        context_len=chunk.start,
        tree=None,
        nodes=NO_TREE,
        logits=logits,
        chosen_positions=np.full(len(logits), chunk.end, dtype=np.int64),
        probe=NO_ROWS,
        scored_tokens=_scored_tokens(chunk),
    )


def _scored_tokens(chunk: PromptChunk) -> Int32:
    if not chunk.num_scored:
        return NO_ROWS
    return chunk.state.request.prompt_ids[chunk.start + 1 : chunk.start + 1 + chunk.num_scored]


def _tree_rows(step: TreeStep, block_size: int) -> _Rows:
    state, tree = step.state, step.tree
    root_position = len(state.token_ids) - 1
    probes = list(step.probes.values())
    offsets = np.concatenate([FIRST_ROW, tree.depths, *(probe.offsets for probe in probes)])
    positions = offsets + np.int32(root_position)
    root = np.array(state.token_ids[-1:], dtype=np.int32)
    slots = slots_of(state.blocks, root_position, len(positions), block_size)
    num_verified = 1 + len(tree)
    return _Rows(
        state=state,
        token_ids=np.concatenate([root, tree.tokens, *(probe.tokens for probe in probes)]),
        positions=positions,
        slots=slots,
        context_len=root_position,
        tree=TreeRows(_mask(tree, probes), slots, positions),
        nodes=tree,
        logits=np.arange(num_verified, dtype=np.int32),
        chosen_positions=positions[:num_verified].astype(np.int64) + 1,
        probe=_wanted_rows(num_verified, probes),
        scored_tokens=NO_ROWS,
    )


def _mask(tree: TokenTree, probes: Sequence[Probe]) -> Bool:
    """bool [rows, rows]: a node sees its ancestors; a probe row sees the root and its own probe."""
    own = tree.mask()
    if not probes:
        return own
    size = len(own) + sum(len(probe.tokens) for probe in probes)
    mask = np.zeros((size, size), dtype=np.bool_)
    mask[:, 0] = True
    mask[: len(own), : len(own)] = own
    start = len(own)
    for probe in probes:
        end = start + len(probe.tokens)
        mask[start:end, start:end] = probe.mask
        start = end
    return mask


def _wanted_rows(first: int, probes: Sequence[Probe]) -> Int32:
    if not probes:
        return NO_ROWS
    wanted = [NO_ROWS]
    for probe in probes:
        wanted.append(probe.wanted + first)
        first += len(probe.tokens)
    return np.concatenate(wanted)


def _take_moves(rows: Sequence[_Rows]) -> Int32:
    moves: list[tuple[int, int]] = []
    for r in rows:
        moves += r.state.moves
        r.state.moves = []
    return np.array(moves, dtype=np.int32).reshape(-1, 2)


def _block_tables(rows: Sequence[_Rows]) -> Int32:
    width = max(len(r.state.blocks) for r in rows)
    tables = np.zeros((len(rows), width), dtype=np.int32)
    for index, r in enumerate(rows):
        tables[index, : len(r.state.blocks)] = r.state.blocks
    return tables


def _edits(rows: Sequence[_Rows]) -> tuple[LogitEdits, ...]:
    found = []
    first_row = 0
    for r in rows:
        if len(r.logits) and (edits := build_edits(r.state, r.nodes, first_row)):
            found.append(edits)
        first_row += len(r.logits)
    return tuple(found)


def _sampling(rows: Sequence[_Rows]) -> SamplingRows:
    counts = [len(r.logits) for r in rows]
    requests = [r.state.request for r in rows]
    return sampling_rows(
        [request.params for request in requests],
        [request.seed for request in requests],
        np.concatenate([r.chosen_positions for r in rows]),
        counts,
    )


def sampling_rows(
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Int64,
    counts: Sequence[int] | None = None,
) -> SamplingRows:
    """Rows of some requests, `counts` of each; by default one. `positions` is int64 [rows]."""
    counts = [1] * len(params) if counts is None else counts

    def floats(values: list[float]) -> Float32:
        return np.repeat(np.array(values, dtype=np.float32), counts)

    return SamplingRows(
        temperature=floats([p.temperature for p in params]),
        top_k=np.repeat(np.array([p.top_k for p in params], dtype=np.int32), counts),
        top_p=floats([p.top_p for p in params]),
        min_p=floats([p.min_p for p in params]),
        typical_p=floats([p.typical_p for p in params]),
        seed=np.repeat(np.array(seeds, dtype=np.int64), counts),
        position=positions,
    )
