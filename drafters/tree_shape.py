"""Trees whose shape is known before anything is drafted: which ranks follow which.

Forms and formulas: docs/drafters.md, "Model trees".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.arrays import ROOT, Float64, Int32
from ..core.compiled import compiled
from ..core.errors import ConfigError

MAX_SHAPE_NODES = 1024
FIELD = "tree"


@dataclass(frozen=True, slots=True, eq=False)
class TreeShape:
    """A tree of ranks, in topological order.

    parents  int32 [n]; -1 is the root
    ranks    int32 [n]  which of its parent's candidates a node is, from 0, the best
    depths   int32 [n]; 1 for children of the root
    """

    parents: Int32
    ranks: Int32
    depths: Int32

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_candidates(self) -> int:
        """Number of candidates needed after a node, at most: the highest rank plus 1."""
        return int(self.ranks.max(initial=-1)) + 1

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 without nodes."""
        return int(self.depths.max(initial=0))

    def cut(self, depth: int) -> TreeShape:
        """The shape of the nodes down to `depth`."""
        kept = self.depths <= depth
        if kept.all():
            return self
        # The root's place is the last, which its index -1 finds.
        index_of = np.append(np.cumsum(kept, dtype=np.int32) - 1, ROOT).astype(np.int32)
        return TreeShape(index_of[self.parents[kept]], self.ranks[kept], self.depths[kept])


def shape_of_paths(paths: Iterable[Sequence[int]]) -> TreeShape:
    """The shape of Medusa's and EAGLE's `choices`: every node as the ranks from the root down.

    Nodes that only stand inside a path belong to the tree, too. They come in order of depth, and
    of ranks within one. Raises `ConfigError`.
    """
    wanted: set[tuple[int, ...]] = set()
    for path in paths:
        ranks = tuple(path)
        if not ranks or not all(type(rank) is int and rank >= 0 for rank in ranks):
            raise ConfigError(FIELD, f"a path must list ranks from 0, not {list(path)!r}")
        wanted.update(ranks[: length + 1] for length in range(len(ranks)))
    if len(wanted) > MAX_SHAPE_NODES:
        raise ConfigError(FIELD, f"has {len(wanted)} nodes, more than {MAX_SHAPE_NODES}")
    ordered = sorted(wanted, key=lambda ranks: (len(ranks), ranks))
    index_of = {ranks: index for index, ranks in enumerate(ordered)} | {(): ROOT}
    return _shape([index_of[ranks[:-1]] for ranks in ordered], [ranks[-1] for ranks in ordered])


def shape_of_widths(widths: Sequence[int]) -> TreeShape:
    """SpecInfer's expansion: every node of depth i - 1 has its `widths[i - 1]` best children.

    (arXiv 2305.09781, `<k_1, .., k_m>`.) Raises `ConfigError`.
    """
    if not all(type(width) is int and width >= 1 for width in widths):
        raise ConfigError(FIELD, f"widths must be whole numbers from 1, not {list(widths)!r}")
    paths: list[tuple[int, ...]] = [()]
    every: list[tuple[int, ...]] = []
    for width in widths:
        paths = [(*path, rank) for path in paths for rank in range(width)]
        every += paths
        if len(every) > MAX_SHAPE_NODES:
            raise ConfigError(FIELD, f"widths make more than {MAX_SHAPE_NODES} nodes")
    return shape_of_paths(every)


def shape_of_successors(successors: Sequence[Sequence[int]]) -> TreeShape:
    """Sequoia's growth map: the children of each node, best first; node 0 is the root.

    Raises `ConfigError`.
    """
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node, children in enumerate(successors):
        for rank, child in enumerate(children):
            if child in paths or not node < child < len(successors):
                raise ConfigError("Successors", f"node {child} is no child of node {node} alone")
            paths[child] = (*paths[node], rank)
    del paths[0]
    return shape_of_paths(paths.values())


def shape_of_sequoia(
    acceptance: Sequence[float], num_nodes: int, max_depth: int
) -> tuple[TreeShape, float]:
    """Sequoia's tree of `num_nodes` nodes, and how many of them are accepted on average.

    acceptance  probability that the child of each rank is the accepted one, given its parent is;
                a node may have no more children than ranks, and no rank without those before it

    The dynamic programme of Chen et al. 2024 (arXiv 2402.12374, section 4.1.2): the best value of
    a node with b children is that of b - 1, plus p_b times the best of the nodes left for the b-th.
    Fewer nodes where depth and ranks leave no room. Raises `ConfigError`.
    """
    tables = _sequoia_tables(acceptance, num_nodes, max_depth)
    nodes = num_nodes
    while not np.isfinite(tables.best[nodes + 1, max_depth]):
        nodes -= 1
    return _shape_in(tables, nodes, max_depth), float(tables.best[nodes + 1, max_depth]) - 1.0


def fastest_shape_of_sequoia(
    acceptance: Sequence[float],
    max_nodes: int,
    max_depth: int,
    seconds: Callable[[int, int], float],
) -> TreeShape:
    """Sequoia's tree that brings most tokens a second (arXiv 2402.12374, section 4.3); it may have
    no nodes.

    seconds  (nodes, depth) -> seconds of a step with such a tree, drafting included

    Raises `ConfigError`.
    """
    tables = _sequoia_tables(acceptance, max_nodes, max_depth)
    best, size = 1.0 / seconds(0, 0), (0, 0)
    for depth in range(1, max_depth + 1):
        for nodes in range(1, max_nodes + 1):
            rate = float(tables.best[nodes + 1, depth]) / seconds(nodes, depth)
            if rate > best:
                best, size = rate, (nodes, depth)
    return _shape_in(tables, *size)


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """Best subtrees by their number of nodes (root included) and of levels below their root.

    values  float64 [nodes + 1, levels + 1, children + 1]
    splits  int32, the same shape: of the best tree, nodes without the last child's subtree
    best    float64 [nodes + 1, levels + 1]: over all numbers of children
    """

    values: Float64
    splits: Int32
    best: Float64


def _sequoia_tables(acceptance: Sequence[float], max_nodes: int, max_depth: int) -> _Tables:
    if not acceptance or not all(0 <= one <= 1 for one in acceptance):
        raise ConfigError("acceptance", f"must be probabilities, not {list(acceptance)!r}")
    return _Tables(*_best_subtrees(np.array(acceptance), max_nodes + 1, max_depth))


def _shape_in(tables: _Tables, num_nodes: int, depth: int) -> TreeShape:
    """The shape of the best tree of so many nodes, root not counted, and levels."""
    paths: list[tuple[int, ...]] = []
    _collect(tables, num_nodes + 1, depth, (), paths)
    return shape_of_paths(paths) if paths else _shape([], [])


@compiled
def _best_subtrees(
    acceptance: Float64, max_size: int, max_depth: int
) -> tuple[Float64, Int32, Float64]:
    shape = (max_size + 1, max_depth + 1, len(acceptance) + 1)
    values = np.full(shape, -np.inf)
    splits = np.zeros(shape, dtype=np.int32)
    best = np.full((max_size + 1, max_depth + 1), -np.inf)
    values[1, :, 0] = 1.0
    best[1] = 1.0
    for size in range(2, max_size + 1):
        for levels in range(1, max_depth + 1):
            for child in range(1, len(acceptance) + 1):
                for rest in range(1, size):
                    below = best[size - rest, levels - 1]
                    # A probability of 0 makes no impossible tree possible.
                    if below > 0:
                        value = values[rest, levels, child - 1] + acceptance[child - 1] * below
                        if value > values[size, levels, child]:
                            values[size, levels, child] = value
                            splits[size, levels, child] = rest
            best[size, levels] = values[size, levels].max()
    return values, splits, best


def _collect(
    tables: _Tables, size: int, levels: int, path: tuple[int, ...], paths: list[tuple[int, ...]]
) -> None:
    """Add the paths of the best tree below `path`."""
    for child in range(int(np.argmax(tables.values[size, levels])), 0, -1):
        left = int(tables.splits[size, levels, child])
        child_path = (*path, child - 1)
        paths.append(child_path)
        _collect(tables, size - left, levels - 1, child_path, paths)
        size = left


def _shape(parents: Sequence[int], ranks: Sequence[int]) -> TreeShape:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return TreeShape(
        np.array(parents, dtype=np.int32),
        np.array(ranks, dtype=np.int32),
        np.array(depths, dtype=np.int32),
    )


def read_tree_shape(path: Path) -> TreeShape:
    """A shape from a JSON file. Raises `ConfigError` naming the file.

    Medusa's and EAGLE's form is a list of paths, or that under `choices`. Sequoia's growth map has
    `Successors`, the children of each node, whose first is the root. `widths` is SpecInfer's.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(FIELD, f"cannot read {path}: {error}") from error
    try:
        if isinstance(data, list):
            return shape_of_paths(data)
        if "choices" in data:
            return shape_of_paths(data["choices"])
        if "widths" in data:
            return shape_of_widths(data["widths"])
        return shape_of_successors(data["Successors"])
    except (ConfigError, TypeError, KeyError, IndexError) as error:
        forms = "a list of paths, or has choices, widths or Successors"
        raise ConfigError(FIELD, f"{path} is no tree ({forms}): {error}") from error
