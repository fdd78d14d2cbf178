"""Turns a plan of prompt chunks and token trees into the flat arrays of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np

from ..arrays import Int32, Int64
from ..compiled import compiled
from ..kv_cache import NO_MOVES
from ..pipelined.chunks import rows_of_edits, with_tree_chunks
from ..proposals import chain_proposal
from ..request.request import DraftStats, RequestState
from ..sampling import build_edits, path_entries, rows_of_requests
from ..state_slots import NO_SLOT
from ..steps import (
    NO_LOG_PROBS,
    NO_PAIRS,
    NO_ROWS,
    LogitEdits,
    LogProbInput,
    MultiStepInput,
    StepInput,
    StepTrees,
    TreeRows,
    Verification,
)
from ..tree.acceptance import AcceptanceTable
from ..tree.merge import merge_all
from ..tree.proposal_batch import ProposalBatch
from ..tree.tree import DEPTH, NO_TREE, TOKEN, visible_columns
from ..verify.walk import Paths, RowSlots, follow, walks_along
from .parts import PromptChunk, ScheduledStep, TreeStep, TreeSteps
from .probes import ancestors_of, probe_input, probe_rows

NO_TOPS = (None, None)


def block_tables(blocks: Sequence[Sequence[int] | Int32]) -> Int32:
    """int32 [requests, most blocks]: the blocks of each, with zeros behind them."""
    counts = np.array(list(map(len, blocks)), dtype=np.int64)
    return fill_tables(np.concatenate(blocks, dtype=np.int32), counts)


def end_ids_of(states: Sequence[RequestState]) -> Int32:
    """int32 [requests, most]: the tokens that end each answer, with -1 behind them."""
    end_ids = [state.stop.end_ids for state in states]
    table = np.full((len(states), max(map(len, end_ids))), -1, dtype=np.int32)
    for row, ids in zip(table, end_ids, strict=True):
        row[: len(ids)] = ids
    return table


def build_step(step_id: int, scheduled: ScheduledStep, block_size: int) -> StepInput:
    """One step of all the scheduled chunks and trees; trees come first.

    Rows of a tree step: root, nodes in tree order, probe rows by source. Takes the KV moves that
    the requests' last commits left.
    """
    trees, chunks, edits, num_decode_steps, _ = scheduled
    states = [*trees.states, *(chunk.state for chunk in chunks)]
    context_lens = [len(state.token_ids) - 1 for state in trees.states]
    context_lens += [chunk.start for chunk in chunks]
    contexts = np.array(context_lens, dtype=np.int32)
    tables = _tables(trees, chunks)
    layout = lay_out(
        trees.trees.nodes,
        trees.trees.node_ends,
        np.array([state.token_ids[-1] for state in trees.states], dtype=np.int32),
        *probe_rows(trees),
        *_chunk_rows(chunks),
        contexts,
        tables,
        block_size,
    )
    token_ids, positions, slots, starts, logits_rows, chosen = layout
    state_slots, state_loads, state_saves = _states(states, chunks)
    return StepInput(
        step_id=step_id,
        moves=_take_moves(trees, chunks),
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        request_starts=starts,
        context_lens=contexts,
        block_tables=tables,
        trees=_tree_rows(trees, starts, slots, positions, tables, block_size),
        logits_rows=logits_rows,
        sampling=rows_of_requests(states, positions[logits_rows].astype(np.int64) + 1, chosen),
        edits=placed_edits(chosen, edits),
        verification=_verification(trees, context_lens),
        log_probs=_log_probs(states, chunks, starts[len(trees) : -1]),
        probes=probe_input(trees, starts),
        multi_step=_multi_step(states, num_decode_steps),
        request_keys=tuple(state.kv.key for state in states),
        state_slots=state_slots,
        state_loads=state_loads,
        state_saves=state_saves,
    )


def _states(
    states: Sequence[RequestState], chunks: Sequence[PromptChunk]
) -> tuple[Int32, Int32, Int32]:
    """Slots of states, and copies between them, where layers keep any."""
    if states[0].kv.state_slot == NO_SLOT:
        return NO_ROWS, NO_PAIRS, NO_PAIRS
    slots = [state.kv.state_slot for state in states]
    loads = [(one.snapshot, one.state.kv.state_slot) for one in chunks if one.snapshot != NO_SLOT]
    saves = [(one.state.kv.state_slot, one.saved_to) for one in chunks if one.saved_to != NO_SLOT]
    load_pairs, save_pairs = (
        np.array(own, dtype=np.int32).reshape(-1, 2) for own in (loads, saves)
    )
    return np.array(slots, dtype=np.int32), load_pairs, save_pairs


def _tree_rows(
    trees: TreeSteps, starts: Int32, slots: Int32, positions: Int32, tables: Int32, block_size: int
) -> Sequence[TreeRows | None]:
    """What the rows see; those of chunks get their KV slots."""
    rows = StepTrees(ancestors_of(trees), starts, slots, positions, len(trees))
    if not trees.tree_chunks:
        return rows
    probes = {index: [*extras.probes.values()] for index, extras in trees.extras.items()}
    return with_tree_chunks(rows, trees.tree_chunks, probes, tables, block_size)


def _tables(trees: TreeSteps, chunks: Sequence[PromptChunk]) -> Int32:
    tables = [state.kv.block_table() for state in trees.states]
    return block_tables([*tables, *(chunk.state.kv.block_table() for chunk in chunks)])


def _multi_step(states: Sequence[RequestState], num_tokens: int) -> MultiStepInput | None:
    return None if num_tokens == 1 else MultiStepInput(num_tokens, end_ids_of(states))


def _log_probs(
    states: Sequence[RequestState], chunks: Sequence[PromptChunk], chunk_starts: Int32
) -> LogProbInput:
    if all(state.packed.num_tops == NO_TOPS for state in states):
        return NO_LOG_PROBS
    return LogProbInput(
        of_targets=any(state.packed.num_tops[0] is not None for state in states),
        num_top=max(num or 0 for state in states for num in state.packed.num_tops),
        scored_rows=_scored_rows(chunks, chunk_starts),
        scored_tokens=_scored_tokens(chunks),
    )


def _verification(trees: TreeSteps, context_lens: Sequence[int]) -> Verification | None:
    candidates = [own.candidates for own in trees.extras.values() if own.candidates is not None]
    if not candidates:
        return None
    assert len(candidates) == len(trees), "one rule decides about all trees"
    return Verification(
        tuple(candidates),
        tuple(state.request.seed for state in trees.states),
        tuple(context_lens[: len(trees)]),
    )


def _chunk_rows(chunks: Sequence[PromptChunk]) -> tuple[Int32, Int32, Int32]:
    """Tokens of all chunks; rows of each, and how many of them get a target token."""
    if not chunks:
        return NO_ROWS, NO_ROWS, NO_ROWS
    rows = np.array([chunk.num_rows for chunk in chunks], dtype=np.int32)
    chosen = np.array([chunk.num_chosen for chunk in chunks], dtype=np.int32)
    return np.concatenate([NO_ROWS, *(chunk.tokens for chunk in chunks)]), rows, chosen


def _scored_rows(chunks: Sequence[PromptChunk], starts: Int32) -> Int32:
    scored = [
        np.arange(start, start + chunk.num_scored, dtype=np.int32)
        for chunk, start in zip(chunks, starts.tolist(), strict=True)
    ]
    return np.concatenate([NO_ROWS, *scored])


def _scored_tokens(chunks: Sequence[PromptChunk]) -> Int32:
    return np.concatenate(
        [NO_ROWS]
        + [
            chunk.state.request.prompt_ids[chunk.start + 1 : chunk.start + 1 + chunk.num_scored]
            for chunk in chunks
        ]
    )


def _take_moves(trees: TreeSteps, chunks: Sequence[PromptChunk]) -> Int32:
    states = (*trees.states, *(chunk.state for chunk in chunks))
    moving = [state for state in states if state.kv.moves is not NO_MOVES]
    if not moving:
        return NO_MOVES
    moves = [state.kv.moves for state in moving]
    for state in moving:
        state.kv.moves = NO_MOVES
    return np.concatenate(moves)


def load_kernels() -> None:
    """Compile the loops over nodes and rows, or load them, so that no step waits for it."""
    table, ids = AcceptanceTable(), np.arange(2, dtype=np.int32)
    batch = ids, ids - 1, np.zeros(2, dtype=np.float32), np.array([2], dtype=np.int64)
    ProposalBatch("any", *batch).check(2)
    proposal = chain_proposal("any", ids)
    trees = merge_all([[proposal], [proposal]], [2, 2], [2, 2], table)
    cut = trees.keep(trees.best_of_each([1, 1]))
    none, starts = NO_ROWS, np.array([0, 3], dtype=np.int32)
    visible_columns(cut.ancestors(), (cut.sizes + 1).astype(np.int32))
    rows = np.arange(6, dtype=np.int32)
    walked = Paths(*follow(trees.nodes, trees.node_ends, rows))
    list(walks_along(walked, trees.names, RowSlots(starts, rows)))
    paths = Paths.of([[(0, 0, -1)]] * 2)
    DraftStats().add([0, 0], trees, paths.sources, paths.ends)
    nodes = trees.nodes, trees.node_ends, ids
    tables = block_tables([ids, ids])
    path_entries(trees[0].nodes)
    lay_out(*nodes, none, none, np.zeros(2, dtype=np.int32), none, none, none, ids, tables, 2)


Contain = Callable[[RequestState], AbstractContextManager[None]]


def edits_of_parts(
    trees: TreeSteps, chunks: Sequence[PromptChunk], contain: Contain
) -> tuple[TreeSteps, Sequence[PromptChunk], list[LogitEdits | None]]:
    """The parts whose changes to logits could be made, and these; none where no request has any.

    contain: what goes wrong with a request's changes ends that request alone
    """
    states = (*trees.states, *(chunk.state for chunk in chunks))
    if not any(state.packed.edits_logits for state in states):
        return trees, chunks, []
    kept, kept_chunks, edits = [], [], []
    for index, tree in enumerate(trees):
        with contain(tree.state):
            edits.append(edits_for(tree))
            kept.append(index)
    for chunk in chunks:
        with contain(chunk.state):
            edits.append(edits_for(chunk))
            kept_chunks.append(chunk)
    return trees.select(kept), kept_chunks, edits


def edits_for(part: TreeStep | PromptChunk) -> LogitEdits | None:
    """What the request's parameters change in the rows of a part, as if they were the first.

    None: nothing, or the part gets no target token.
    """
    if not part.num_chosen:
        return None
    if isinstance(part, TreeStep):
        if part.tree_chunk is None:
            return build_edits(part.state, part.tree, 0, part.extras.grammar_masks)
        edits = build_edits(part.state, part.tree_chunk.path, 0)
        return None if edits is None else rows_of_edits(edits, part.tree_chunk.rows)
    permitted = part.state.request.allowed_tokens
    constraint = None if permitted is None else permitted.constraint
    masks = None if constraint is None else constraint.first[None]
    return build_edits(part.state, NO_TREE, 0, masks)


def placed_edits(chosen: Int32, edits: Sequence[LogitEdits | None]) -> tuple[LogitEdits, ...]:
    """The edits of a step's parts at their rows; `chosen` int32 [parts]: how many each part has."""
    if not edits:
        return ()
    firsts = [0, *chosen.cumsum().tolist()]
    placed = zip(firsts, edits, strict=False)
    return tuple(replace(edit, first_row=first) for first, edit in placed if edit is not None)


@compiled
def lay_out(  # noqa: PLR0913, PLR0917 - flat arrays, and one loop over them
    nodes: Int32,
    node_ends: Int64,
    roots: Int32,
    probe_tokens: Int32,
    probe_offsets: Int32,
    num_probes: Int32,
    chunk_tokens: Int32,
    chunk_rows: Int32,
    chunk_chosen: Int32,
    context_lens: Int32,
    block_tables: Int32,
    block_size: int,
) -> tuple[Int32, Int32, Int32, Int32, Int32, Int32]:
    """The rows of all requests: those of trees first, then prompt chunks.

    nodes, node_ends, roots  of the trees, as in `TreeBatch`; the last committed token of each
    probe_tokens, probe_offsets, num_probes  all probe rows, and how many each tree has
    chunk_tokens, chunk_rows, chunk_chosen   all prompt rows, how many each chunk has, and how many
                             of these, the last ones, get a target token
    context_lens, block_tables, block_size   of all requests, as in `StepInput`

    Gives token ids, positions and KV slots, int32 [rows]; where each request's rows begin, int32
    [requests + 1]; the rows that get a target token; how many of them each request has, int32
    [requests].
    """
    num_trees, num_parts = len(node_ends), len(context_lens)
    total = num_trees + len(nodes) + len(probe_tokens) + len(chunk_tokens)
    token_ids = np.empty(total, dtype=np.int32)
    positions = np.empty(total, dtype=np.int32)
    starts = np.zeros(num_parts + 1, dtype=np.int32)
    chosen = np.empty(num_parts, dtype=np.int32)
    row, node, probe = 0, 0, 0
    for tree in range(num_trees):
        context_len, first = context_lens[tree], row
        token_ids[row], positions[row] = roots[tree], context_len
        row += 1
        while node < node_ends[tree]:
            token_ids[row] = nodes[node, TOKEN]
            positions[row] = context_len + nodes[node, DEPTH]
            row += 1
            node += 1
        chosen[tree] = row - first
        for _ in range(num_probes[tree]):
            token_ids[row] = probe_tokens[probe]
            positions[row] = context_len + probe_offsets[probe]
            row += 1
            probe += 1
        starts[tree + 1] = row
    token_ids[row:] = chunk_tokens
    for chunk in range(num_parts - num_trees):
        for index in range(chunk_rows[chunk]):
            positions[row] = context_lens[num_trees + chunk] + index
            row += 1
        chosen[num_trees + chunk] = chunk_chosen[chunk]
        starts[num_trees + chunk + 1] = row
    slots = _slots(starts, context_lens, block_tables, block_size)
    return token_ids, positions, slots, starts, _chosen_rows(starts, chosen, num_trees), chosen


@compiled
def fill_tables(blocks: Int32, counts: Int64) -> Int32:
    """int32 [requests, most blocks]: the blocks of each, `counts` of them, zeros behind them."""
    tables = np.zeros((len(counts), counts.max()), dtype=np.int32)
    first = 0
    for request in range(len(counts)):
        for index in range(counts[request]):
            tables[request, index] = blocks[first + index]
        first += counts[request]
    return tables


@compiled
def _slots(starts: Int32, context_lens: Int32, block_tables: Int32, block_size: int) -> Int32:
    """A row's KV stands at its position in the request's KV, not its depth in a tree."""
    slots = np.empty(starts[-1], dtype=np.int32)
    for part in range(len(context_lens)):
        for row in range(starts[part], starts[part + 1]):
            position = context_lens[part] + row - starts[part]
            slots[row] = kv_slot(block_tables[part], position, block_size)
    return slots


@compiled
def kv_slot(table: Int32, position: int, block_size: int) -> int:
    """The KV slot of a position, whose request has the blocks int32 [blocks] of `table`."""
    return table[position // block_size] * block_size + position % block_size


@compiled
def kv_slots(block_tables: Int32, owners: Int32, positions: Int32, block_size: int) -> Int32:
    """int32 [n]: KV slots of positions int32 [n] in the tables `owners` int32 [n] of all."""
    slots = np.empty(len(positions), dtype=np.int32)
    for index in range(len(positions)):
        slots[index] = kv_slot(block_tables[owners[index]], positions[index], block_size)
    return slots


@compiled
def _chosen_rows(starts: Int32, chosen: Int32, num_trees: int) -> Int32:
    """The first rows of trees, the last ones of chunks."""
    rows = np.empty(chosen.sum(), dtype=np.int32)
    count = 0
    for part in range(len(chosen)):
        first = starts[part] if part < num_trees else starts[part + 1] - chosen[part]
        for index in range(chosen[part]):
            rows[count] = first + index
            count += 1
    return rows
