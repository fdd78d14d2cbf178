"""Chunks of pipelined trees: their rows in a step, and what its output means for them.

See docs/how-it-works.md, "Pipelined trees". A chunk's first row is the root, computed where it
belongs; then come nodes that were not sent yet. What they see of nodes of earlier chunks stands
where these wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..arrays import Float32, Int32
from ..proposals import FeatureRows, Probe
from ..request.output import Chosen, RowOutput
from ..request.request import RequestState
from ..steps import LogitEdits, Penalties, StepTrees, TreeRows
from ..tree.tree import NO_TREE, TokenTree, pack, with_masks
from .tree import PipelinedNode, PipelinedTree, token_tree, with_ancestors


@dataclass(frozen=True, slots=True, eq=False)
class TreeChunk:
    """The part of a request's tree that goes into one step.

    root   as it is when the chunk is sent
    nodes  that were not sent before, parents first
    above  these and their ancestors below the root, and
    path   the same as a tree
    rows   int32 [1 + nodes]  rows of `path` that are computed, its root's first
    is_first  whether nothing of the tree was on its way before
    """

    pipelined: PipelinedTree
    root: PipelinedNode
    nodes: Sequence[PipelinedNode]
    above: Sequence[PipelinedNode]
    path: TokenTree
    rows: Int32
    is_first: bool

    @classmethod
    def of(
        cls, pipelined: PipelinedTree, nodes: Sequence[PipelinedNode], names: tuple[str, ...]
    ) -> TreeChunk:
        """That of these nodes."""
        new = set(map(id, nodes))
        above = with_ancestors(nodes)
        rows = [row for row, node in enumerate(above, 1) if id(node) in new]
        return cls(
            pipelined,
            pipelined.root,
            [above[row - 1] for row in rows],
            above,
            token_tree(above, pipelined.root.position, names),
            np.array([0, *rows], dtype=np.int32),
            pipelined.is_new,
        )

    def bare(self) -> TreeChunk:
        """That of the root alone."""
        return TreeChunk.of(self.pipelined, (), self.path.names)

    def tree(self) -> TokenTree:
        """The nodes that are computed, those whose parents are in flight below the root."""
        return token_tree(self.nodes, self.root.position, self.path.names)

    @property
    def num_pruned(self) -> int:
        """Nodes that the text has left."""
        return sum(not node.is_alive for node in self.nodes)

    @property
    def most_positions(self) -> int:
        """KV positions that hold all KV of the request, at most."""
        deepest = max((node.position + 1 for node in self.nodes), default=0)
        return max(self.pipelined.num_positions, deepest) + len(self.nodes)

    def place_kv(self, table: Int32, block_size: int, probes: Sequence[Probe]) -> TreeRows:
        """Give the nodes their KV positions; what the rows see beside the committed text.

        table: int32 [blocks], the request's
        probes: whose rows stand behind, at KV positions that are free again after the step
        """
        self.pipelined.place_kv(self.nodes)
        positions = np.array(list(map(_kv_position, (self.root, *self.above))), dtype=np.int32)
        is_earlier = np.ones(len(positions), dtype=np.bool_)
        is_earlier[self.rows] = False
        columns = np.concatenate([np.flatnonzero(is_earlier), self.rows])
        offsets = np.concatenate([np.zeros(1, dtype=np.int32), self.path.depths])[columns]
        mask, positions = self.path.mask()[np.ix_(self.rows, columns)], positions[columns]
        if probes:
            mask = with_masks(mask, int(is_earlier.sum()), [probe.mask for probe in probes])
            offsets = np.concatenate([offsets, *(probe.offsets for probe in probes)])
            free = self.pipelined.free_positions(len(offsets) - len(positions))
            positions = np.concatenate([positions, np.array(free, dtype=np.int32)])
        return TreeRows(
            pack(mask),
            slots_of(table, positions, block_size),
            (self.root.position + offsets).astype(np.int32),
        )

    def take(self, targets: Chosen) -> None:
        """Note what was chosen after the rows."""
        for row, node in enumerate((self.root, *self.nodes)):
            # The root may have been a node of an earlier chunk.
            if node.target is None:
                node.target = int(targets.tokens[row])
                node.output = (targets, row)


def slots_of(table: Int32, positions: Int32, block_size: int) -> Int32:
    """int32 [n]: the KV slots of KV positions int32 [n] in a request's blocks."""
    return table[positions // block_size] * np.int32(block_size) + positions % np.int32(block_size)


def with_tree_chunks(
    trees: StepTrees,
    tree_chunks: Mapping[int, TreeChunk],
    probes: Mapping[int, Sequence[Probe]],
    tables: Int32,
    block_size: int,
) -> Sequence[TreeRows | None]:
    """What the rows of a step see, whose requests at the indices of `tree_chunks` are pipelined.

    Gives their nodes KV positions, and writes the KV slots of their rows into `trees.slots`.
    """
    own: dict[int, TreeRows] = {}
    for index, part in tree_chunks.items():
        own[index] = part.place_kv(tables[index], block_size, probes.get(index, ()))
        start, count = int(trees.starts[index]), len(own[index].ancestors)
        trees.slots[start : start + count] = own[index].slots[-count:]
    return [own.get(index, rows) for index, rows in enumerate(trees[:])]


def rows_of_edits(edits: LogitEdits, rows: Int32) -> LogitEdits:
    """Changes to the logits of some of the rows after a tree's root and nodes."""
    mask, penalties = edits.mask, edits.penalties
    if mask is not None and len(mask) > 1:
        mask = mask[rows]
    if penalties is not None:
        penalties = _penalties_of_rows(penalties, rows)
    return replace(edits, num_rows=len(rows), mask=mask, penalties=penalties)


def _penalties_of_rows(penalties: Penalties, rows: Int32) -> Penalties:
    new = np.full(int(rows.max()) + 1, -1, dtype=np.int32)
    new[rows] = np.arange(len(rows), dtype=np.int32)
    is_within = penalties.path_rows < len(new)
    kept = np.flatnonzero(is_within)
    kept = kept[new[penalties.path_rows[kept]] >= 0]
    return replace(
        penalties,
        path_rows=new[penalties.path_rows[kept]],
        path_tokens=penalties.path_tokens[kept],
    )


def _kv_position(node: PipelinedNode) -> int:
    assert node.kv_position is not None, "a node's ancestors are sent before it or with it"
    return node.kv_position


class ChunkOutput(NamedTuple):
    """What one request gets from the output of a chunk.

    drafted  its whole tree before the output, to learn from; none where the root stays
    path     as `Paths` has them: rows of `chosen`, tokens, ids of sources; empty where the root's
             next token is not known yet
    chosen   after the root and the nodes that the root goes over
    rows     of the chunk, in which the path's steps are; 0 of a step that is in an earlier one
    features  of these, as far as they are known of all before one; none if they are not wanted
    """

    drafted: TokenTree
    path: Sequence[tuple[int, int, int]]
    chosen: Chosen
    rows: Sequence[int] = ()
    features: Sequence[FeatureRows] = ()


NO_CHUNK_OUTPUT = ChunkOutput(NO_TREE, (), Chosen.along(()))


def read_chunk(
    state: RequestState, part: TreeChunk, targets: Chosen, block_size: int
) -> ChunkOutput:
    """Take the output into the request's tree; its next step moves the KV of what was passed.

    A request that has ended, or gave up its KV since, takes nothing: it computes that again.
    """
    pipelined = part.pipelined
    if state.has_ended or state.pipelined is not pipelined:
        return NO_CHUNK_OUTPUT
    part.take(targets)
    if pipelined.root.target is None:
        # Mostly of a chunk that is in vain: the root waits for another.
        return NO_CHUNK_OUTPUT
    first = pipelined.root.position
    drafted = token_tree(pipelined.alive(), first, part.path.names)
    passed = pipelined.advance()
    at_leaf = passed.at_leaf and bool(part.nodes)
    pipelined.outcomes.append(at_leaf)
    if passed.moves:
        moves = slots_of(
            state.kv.block_table(), np.array(passed.moves, dtype=np.int32).ravel(), block_size
        ).reshape(-1, 2)
        state.kv.moves = np.concatenate([state.kv.moves, moves])
    steps = zip(range(len(passed.tokens)), passed.tokens, passed.sources, strict=True)
    rows = [row if chosen is targets else 0 for chosen, row in passed.outputs]
    features = _features(state.request_id, first, passed.outputs)
    return ChunkOutput(drafted, list(steps), Chosen.along(passed.outputs), rows, features)


def _features(request_id: str, position: int, outputs: Sequence[RowOutput]) -> list[FeatureRows]:
    """Those of passed nodes, the first of which stands at `position`; a gap parts them."""
    found: list[FeatureRows] = []
    values: list[Float32] = []
    for index, (chosen, row) in enumerate(outputs):
        if chosen.features is not None:
            values.append(chosen.features[row])
        if values and (chosen.features is None or index + 1 == len(outputs)):
            end = position + index + (chosen.features is not None)
            found.append(FeatureRows(request_id, end - len(values), np.stack(values)))
            values = []
    return found
