"""Turns a plan of prompt chunks and token trees into the flat arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..arrays import Int32, UInt32, UInt64
from ..compiled import compiled
from ..proposals import Probe, chain_proposal
from ..request.request import RequestState
from ..sampling.rows import build_edits, sampling_rows
from ..steps import LogitEdits, StepInput, TreeCandidates, TreeRows, Verification
from ..tree.acceptance_table import AcceptanceTable
from ..tree.kernels import follow, pack, runs, unpack
from ..tree.merge import merge
from ..tree.tree import NO_TREE, TokenTree, ancestor_bits, attribute, node_ends

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
    def context_len(self) -> int:
        """Tokens that are cached before it."""
        return self.start

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return self.end - self.start

    @property
    def num_chosen(self) -> int:
        """Rows, the last ones, that get a target token."""
        return int(self.wants_token)

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

    drafted              the tree before the budget cut it, to learn from
    num_top_next_tokens  how many most probable next tokens of the root and every node are wanted,
                         by source
    candidates           of the tree, where an acceptance rule decides; else None
    form                 uint32 [1 + nodes, words]  the tokens that the request's constraint allows
                         after the root and each node; None without one
    """

    state: RequestState
    tree: TokenTree
    probes: dict[str, Probe]
    drafted: TokenTree
    num_top_next_tokens: dict[str, int] = field(default_factory=dict)
    candidates: TreeCandidates | None = None
    form: UInt32 | None = None

    @property
    def context_len(self) -> int:
        """Tokens that are cached before the root."""
        return len(self.state.token_ids) - 1

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        num_chosen = self.num_chosen
        # Nearly never any: a property that every step reads several times for every request.
        if not self.probes:
            return num_chosen
        return num_chosen + sum(len(probe.tokens) for probe in self.probes.values())

    @property
    def num_chosen(self) -> int:
        """Rows, the first ones, that get a target token."""
        return 1 + len(self.tree)


def slots_of(blocks: Sequence[int], first: int, count: int, block_size: int) -> Int32:
    """KV slots of positions `first` to `first + count` of a request with these blocks."""
    first_block, offset = divmod(first, block_size)
    last_block = (first + count - 1) // block_size
    table = np.array(blocks[first_block : last_block + 1], dtype=np.int32) * block_size
    slots = table[:, None] + np.arange(block_size, dtype=np.int32)
    return slots.ravel()[offset : offset + count]


def kv_moves(state: RequestState, rows: Sequence[int], block_size: int) -> list[tuple[int, int]]:
    """KV copies that bring the rows of the root and the accepted nodes together, in order.

    To be called after the commit. A row's KV stands as many slots behind the root's as the row does
    in the step.
    """
    last = rows[-1]
    if last == len(rows) - 1:
        return []
    root_position = len(state.token_ids) - len(rows) - 1
    slots = slots_of(state.blocks, root_position, last + 1, block_size).tolist()
    return [(slots[row], slots[place]) for place, row in enumerate(rows) if row != place]


def block_tables(blocks: Sequence[Sequence[int]]) -> Int32:
    """int32 [requests, most blocks]: the blocks of each, with zeros behind them."""
    width = max(map(len, blocks))
    rows = [[*held, *[0] * (width - len(held))] for held in blocks]
    return np.array(rows, dtype=np.int32)


def build_step(
    step_id: int,
    chunks: Sequence[PromptChunk],
    trees: Sequence[TreeStep],
    block_size: int,
    edits: Sequence[LogitEdits | None],
) -> StepInput:
    """One step of all the given chunks and trees; trees come first.

    `edits`: `edits_for` of each part.

    Rows of a tree step: root, nodes in tree order, probe rows by source. Takes the KV moves that
    the requests' last commits left.
    """
    parts = [*trees, *chunks]
    states = [part.state for part in parts]
    params = [state.request.params for state in states]
    counts = np.array([part.num_rows for part in parts], dtype=np.int32)
    starts = np.concatenate([FIRST_ROW, np.cumsum(counts, dtype=np.int32)])
    context_lens = np.array([part.context_len for part in parts], dtype=np.int32)
    tables = block_tables([state.blocks for state in states])
    slots, positions = lay_out(counts, context_lens, tables, _offsets(trees), block_size)
    chosen = np.array([part.num_chosen for part in parts], dtype=np.int32)
    firsts = np.concatenate([starts[: len(trees)], (starts[1:] - chosen)[len(trees) :]])
    logits_rows = runs(firsts, chosen)
    num_scored = np.array([chunk.num_scored for chunk in chunks], dtype=np.int32)
    return StepInput(
        step_id=step_id,
        moves=_take_moves(states),
        token_ids=_token_ids(chunks, trees),
        positions=positions,
        slots=slots,
        request_starts=starts,
        context_lens=context_lens,
        block_tables=tables,
        trees=_tree_rows(trees, starts, slots, positions) + (None,) * len(chunks),
        logits_rows=logits_rows,
        sampling=sampling_rows(
            [p.temperature for p in params],
            params,
            [state.request.seed for state in states],
            positions[logits_rows].astype(np.int64) + 1,
            chosen,
        ),
        probe_rows=_probe_rows(trees, starts),
        probe_top_k=_probe_top_k(trees),
        scored_rows=runs(starts[len(trees) : -1], num_scored),
        scored_tokens=_scored_tokens(chunks),
        with_log_probs=any(p.logprobs is not None for p in params),
        verification=_verification(trees),
        edits=_placed(parts, edits),
        num_top=max(max(p.logprobs or 0, p.prompt_logprobs or 0) for p in params),
    )


def _verification(trees: Sequence[TreeStep]) -> Verification | None:
    candidates = [step.candidates for step in trees if step.candidates is not None]
    if not candidates:
        return None
    assert len(candidates) == len(trees), "one rule decides about all trees"
    return Verification(
        tuple(candidates),
        tuple(step.state.request.seed for step in trees),
        tuple(step.context_len for step in trees),
    )


def _offsets(trees: Sequence[TreeStep]) -> Int32:
    """Position of each row of a tree minus its request's context."""
    pieces = [
        piece
        for step in trees
        for piece in (FIRST_ROW, step.tree.depths, *(p.offsets for p in step.probes.values()))
    ]
    return np.concatenate([NO_ROWS, *pieces])


def _token_ids(chunks: Sequence[PromptChunk], trees: Sequence[TreeStep]) -> Int32:
    roots = np.array([step.state.token_ids[-1] for step in trees], dtype=np.int32)
    pieces = [
        piece
        for index, step in enumerate(trees)
        for piece in (
            roots[index : index + 1],
            step.tree.tokens,
            *(probe.tokens for probe in step.probes.values()),
        )
    ]
    pieces += [
        np.array(chunk.state.token_ids[chunk.start : chunk.end], dtype=np.int32) for chunk in chunks
    ]
    return np.concatenate(pieces)


def _tree_rows(
    trees: Sequence[TreeStep], starts: Int32, slots: Int32, positions: Int32
) -> tuple[TreeRows | None, ...]:
    ends = starts.tolist()
    masks = ancestor_bits([step.tree for step in trees])
    return tuple(
        TreeRows(_with_probes(bits, step), slots[first:end], positions[first:end])
        for step, bits, first, end in zip(trees, masks, ends, ends[1:], strict=False)
    )


def _with_probes(bits: UInt64, step: TreeStep) -> UInt64:
    """The bits of a tree, and of probe rows, which see the root and their own probe."""
    if not step.probes:
        return bits
    size, start = step.num_rows, step.num_chosen
    mask = np.zeros((size, size), dtype=np.bool_)
    mask[:, 0] = True
    mask[:start, :start] = unpack(bits, start)
    for probe in step.probes.values():
        end = start + len(probe.tokens)
        mask[start:end, start:end] = probe.mask
        start = end
    return pack(mask)


def _probe_rows(trees: Sequence[TreeStep], starts: Int32) -> Int32:
    wanted = [NO_ROWS]
    for step, start in zip(trees, starts, strict=False):
        if not (step.num_top_next_tokens or step.probes):
            continue
        first = start + step.num_chosen
        if step.num_top_next_tokens:
            wanted.append(np.arange(start, first, dtype=np.int32))
        for probe in step.probes.values():
            wanted.append(probe.wanted + first)
            first += len(probe.tokens)
    return np.concatenate(wanted)


def _probe_top_k(trees: Sequence[TreeStep]) -> int:
    probes = (probe.top_k for step in trees for probe in step.probes.values())
    top_next_tokens = (count for step in trees for count in step.num_top_next_tokens.values())
    return max((0, *probes, *top_next_tokens))


def _scored_tokens(chunks: Sequence[PromptChunk]) -> Int32:
    return np.concatenate(
        [NO_ROWS]
        + [
            chunk.state.request.prompt_ids[chunk.start + 1 : chunk.start + 1 + chunk.num_scored]
            for chunk in chunks
        ]
    )


def _take_moves(states: Sequence[RequestState]) -> Int32:
    moves: list[tuple[int, int]] = []
    for state in states:
        moves += state.moves
        state.moves = []
    return np.array(moves, dtype=np.int32).reshape(-1, 2)


def edits_for(part: TreeStep | PromptChunk) -> LogitEdits | None:
    """What the request's parameters change in the rows of a part, as if they were the first.

    None: nothing, or the part gets no target token.
    """
    if not part.num_chosen:
        return None
    if isinstance(part, TreeStep):
        return build_edits(part.state, part.tree, 0, part.form)
    permitted = part.state.request.allowed_tokens
    constraint = None if permitted is None else permitted.constraint
    form = None if constraint is None else constraint.first[None]
    return build_edits(part.state, NO_TREE, 0, form)


def _placed(
    parts: Sequence[TreeStep | PromptChunk], edits: Sequence[LogitEdits | None]
) -> tuple[LogitEdits, ...]:
    placed = []
    first_row = 0
    for part, edit in zip(parts, edits, strict=True):
        if edit is not None:
            placed.append(replace(edit, first_row=first_row))
        first_row += part.num_chosen
    return tuple(placed)


def load_kernels() -> None:
    """Compile the loops over nodes and rows, or load them, so that no step waits for it."""
    table, ids = AcceptanceTable(), np.arange(2, dtype=np.int32)
    tree = merge([chain_proposal("any", ids)], 2, 2, table)
    tree.keep(ids < 1)
    tree.mask()
    tree.learn(table, [0])
    tree.count_sources()
    follow(tree.nodes, node_ends([tree]), np.arange(3, dtype=np.int32))
    attribute([tree], [[0, 1]], np.zeros(1))
    lay_out(ids, ids, np.zeros((2, 1), dtype=np.int32), ids, 1)
    runs(ids, ids)


@compiled
def lay_out(
    counts: Int32, context_lens: Int32, block_tables: Int32, offsets: Int32, block_size: int
) -> tuple[Int32, Int32]:
    """KV slots and positions of all rows, `counts[i]` of request i.

    A row's KV stands where its place in the request says, not its depth in a tree. Its position is
    `offsets[row]` behind its request's context; rows without an offset, the last ones, follow each
    other.
    """
    total = counts.sum()
    slots = np.empty(total, dtype=np.int32)
    positions = np.empty(total, dtype=np.int32)
    row = 0
    for request in range(len(counts)):
        context_len = context_lens[request]
        for index in range(counts[request]):
            place = context_len + index
            block = block_tables[request, place // block_size]
            slots[row] = block * block_size + place % block_size
            positions[row] = context_len + (offsets[row] if row < len(offsets) else index)
            row += 1
    return slots, positions
