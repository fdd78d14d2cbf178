"""The tree of one request whose nodes go through the pipeline in several steps, one behind another.

Its root is the last committed token. Nodes are sent in chunks, each of which goes out while those
before it are on their way; outputs come in the order of the chunks, and the root advances over
every token of the target that is known. What the target leaves is dropped, wherever it is. See
docs/how-it-works.md, "Pipelined trees".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import ROOT
from ..proposals import TopNextTokens
from ..request.output import RowOutput
from ..tree.tree import NO_TREE, PARENT, SOURCE, TOKEN, TokenTree

# The source of a token that no drafter wrote.
TARGET_ID = -1


class PipelinedNode:
    """A token of the tree.

    position  absolute
    source    id of the drafter that proposed it first; -1: the target chose it
    value     probability that the target goes through it, given the committed text
    kv_position  where in the request's KV it stands; None before it is sent. Never before its own
              position
    target    the target's token after it, and
    output    where that was chosen; None until it is known
    is_alive  whether it is the root or below it; else the root has gone over it, or it is_dropped
    was_asked whether drafters were asked what follows it
    attributions  of each drafter that proposed it: its id, its rank, its depth in the proposal, its
              log-probability
    """

    __slots__ = (
        "attributions", "children", "is_alive", "is_dropped", "kv_position", "output", "parent",
        "position", "source", "target", "token", "value", "was_asked",
    )  # fmt: skip

    def __init__(self, token: int, position: int, source: int, parent: PipelinedNode | None):
        self.token = token
        self.position = position
        self.source = source
        self.parent = parent
        self.children: dict[int, PipelinedNode] = {}
        self.value = 1.0
        self.kv_position: int | None = None
        self.target: int | None = None
        self.output: RowOutput | None = None
        self.is_alive, self.is_dropped = True, False
        self.was_asked = False
        self.attributions: list[tuple[int, int, int, float]] = []


class RootAdvance(NamedTuple):
    """What the root went over.

    tokens, sources  that are committed; the source of a token that is no node is -1
    outputs          of the rows that these follow
    moves            KV copies (from, to KV position) that bring the passed nodes together
    at_leaf          whether no other computed node follows the last one
    """

    tokens: list[int]
    sources: list[int]
    outputs: list[RowOutput]
    moves: list[tuple[int, int]]
    at_leaf: bool


class Flight(NamedTuple):
    """A chunk on its way: when its output is expected, and the nodes that it is about."""

    due_at: float
    nodes: Sequence[PipelinedNode]


class PipelinedTree:
    """Grows below a root that advances. Knows KV positions, not slots or blocks."""

    __slots__ = (
        "_alive",
        "_flights",
        "_newest",
        "_used",
        "asked",
        "drafters",
        "num_in_place",
        "outcomes",
        "root",
        "undelivered",
    )

    def __init__(self, token: int, position: int) -> None:
        """`token` is the last committed one."""
        self.root: PipelinedNode = PipelinedNode(token, position, TARGET_ID, None)
        # Those below the root, until these change.
        self._alive: Sequence[PipelinedNode] | None = None
        # KV positions of nodes that are alive.
        self._used: set[int] = set()
        # What was sent and has no output yet; the root and the nodes of the newest chunk.
        self._flights: deque[Flight] = deque()
        self._newest: Sequence[PipelinedNode] = ()
        # The node that drafters are being asked about.
        self.asked: PipelinedNode | None = None
        # Who is asked about it.
        self.drafters: tuple[str, ...] = ()
        # What drafters receive with the next commit, by name.
        self.undelivered: Mapping[str, TopNextTokens] = {}
        # Of the outputs that moved the root, since nothing of it was on its way: whether at a leaf.
        self.outcomes: list[bool] = []
        # Tokens of the text whose KV is where it belongs, once the steps so far have run.
        self.num_in_place = position

    @property
    def is_new(self) -> bool:
        """Whether nothing of it is on its way: the next chunk is a round's tree."""
        return self.root.kv_position is None

    def alive(self) -> Sequence[PipelinedNode]:
        """All nodes but the root, parents before their children."""
        if self._alive is None:
            self._alive = _subtrees(self.root.children.values())
        return self._alive

    def graft(self, tree: TokenTree, at: PipelinedNode) -> None:
        """Add what was drafted behind a node that is alive, or is the root."""
        self._alive = None
        nodes: list[PipelinedNode] = []
        values = (at.value * tree.values).tolist()
        for row, value in zip(tree.nodes.tolist(), values, strict=True):
            parent, token = at if row[PARENT] == ROOT else nodes[row[PARENT]], row[TOKEN]
            node = parent.children.get(token)
            if node is None:
                node = PipelinedNode(token, parent.position + 1, row[SOURCE], parent)
                node.value = value
                parent.children[token] = node
            node.value = min(max(node.value, value), parent.value)
            nodes.append(node)
        for parent in (at, *nodes):
            _share_out(parent)
        log_probs = tree.attribution_log_probs.tolist()
        for (index, drafter, rank, depth), log_prob in zip(
            tree.attributions.tolist(), log_probs, strict=True
        ):
            own = nodes[index].attributions
            if all(drafter != other for other, *_ in own):
                own.append((drafter, rank, depth, log_prob))

    def to_extend(self, least_value: float, max_depth: int) -> PipelinedNode | None:
        """The most probable node that nothing follows yet and that was not asked about; None where
        no such node is worth `least_value`. First the root, where nothing is on its way: all that
        was drafted behind it knew less of the text."""
        most = self.root.position + max_depth
        if self.is_new and not self.root.was_asked and max_depth > 0:
            return self.root
        leaves = [
            node
            for node in (self.root, *self.alive())
            if not (node.children or node.was_asked)
            and node.value >= least_value
            and node.position < most
        ]
        return max(leaves, key=_value, default=None)

    def unsent(self, least_value: float, limit: int, max_depth: int) -> list[PipelinedNode]:
        """The most probable nodes that are still to be sent, parents first; at most `limit`."""
        most = self.root.position + max_depth
        found = [
            node
            for node in self.alive()
            if node.kv_position is None and node.value >= least_value and node.position <= most
        ]
        # Stable, and a node is worth no more than its parent: parents stay where children do.
        best = sorted(found, key=_value, reverse=True)[:limit]
        chosen = set(map(id, best))
        return [node for node in found if id(node) in chosen]

    def place_kv(self, nodes: Sequence[PipelinedNode]) -> None:
        """Give nodes KV positions; the root's is where it belongs from now on.

        One is free again as soon as its node is dropped: stages run steps in order, so the next
        node there is written after every step that reads the old one.
        """
        root = self.root
        if root.kv_position is not None:
            self._used.discard(root.kv_position)
        root.kv_position = self.num_in_place = root.position
        self._used.add(root.kv_position)
        self._newest = (root, *nodes)
        for node in nodes:
            node.kv_position = self._free_position(node.position)
            self._used.add(node.kv_position)

    def note_flight(self, due_at: float) -> None:
        """The nodes that were sent last are on their way; their output is expected then."""
        self._flights.append(Flight(due_at, self._newest))

    def note_landing(self) -> None:
        """The oldest flight has finished."""
        if self._flights:
            self._flights.popleft()

    def next_output_at(self) -> float:
        """When the next output is expected that says more of the tree; infinity: none is."""
        for due_at, nodes in self._flights:
            if any(node.is_alive and node.target is None for node in nodes):
                return due_at
        return math.inf

    def _free_position(self, position: int) -> int:
        """The first from this one on that no node has."""
        while position in self._used:
            position += 1
        return position

    def free_positions(self, count: int) -> list[int]:
        """The first ones behind the root that no node has."""
        found: list[int] = []
        position = self.root.position
        while len(found) < count:
            position = self._free_position(position + 1)
            found.append(position)
        return found

    @property
    def num_positions(self) -> int:
        """KV positions up to the last that is in use."""
        return max((self.root.position, *self._used)) + 1

    def advance(self) -> RootAdvance:
        """Follow the target's tokens from the root for as long as they are known."""
        passed, at_leaf = RootAdvance([], [], [], [], at_leaf=True), True
        while (token := self.root.target) is not None:
            old = self.root
            assert old.kv_position is not None
            assert old.output is not None
            if old.kv_position != old.position:
                passed.moves.append((old.kv_position, old.position))
            self._used.discard(old.kv_position)
            at_leaf = all(child.target is None for child in old.children.values())
            self.root = self._step_to(old, token)
            passed.tokens.append(token)
            passed.sources.append(self.root.source)
            passed.outputs.append(old.output)
        return passed._replace(at_leaf=at_leaf)

    def _step_to(self, old: PipelinedNode, token: int) -> PipelinedNode:
        """The new root; all that is not below it is dropped."""
        self._alive = None
        new = old.children.pop(token, None)
        for node in _subtrees(old.children.values()):
            node.is_alive, node.is_dropped = False, True
            if node.kv_position is not None:
                self._used.discard(node.kv_position)
        old.is_alive, old.children = False, {}
        if new is None:
            return PipelinedNode(token, old.position + 1, TARGET_ID, None)
        # Drafters that had nothing to say behind a path know more of a text.
        new.was_asked = False
        # What is known of the node it follows is in its value no more.
        share, new.parent = new.value, None
        for node in _subtrees([new]):
            node.value = min(1.0, node.value / share) if share > 0 else 1.0
        return new


def path_to(node: PipelinedNode) -> list[int]:
    """The tokens from behind the root down to a node that is alive; none for the root."""
    tokens: list[int] = []
    while node.parent is not None:
        tokens.append(node.token)
        node = node.parent
    return tokens[::-1]


def with_ancestors(nodes: Sequence[PipelinedNode]) -> list[PipelinedNode]:
    """These and all between the root and them, parents first, and `nodes` in their order."""
    found: dict[int, PipelinedNode] = {}
    for node in nodes:
        above: list[PipelinedNode] = []
        at: PipelinedNode | None = node
        while at is not None and at.parent is not None and id(at) not in found:
            above.append(at)
            at = at.parent
        found.update((id(one), one) for one in reversed(above))
    return [*found.values()]


def token_tree(
    nodes: Sequence[PipelinedNode], root_position: int, names: tuple[str, ...]
) -> TokenTree:
    """Nodes, parents first, as a tree; one whose parent is not among them stands below the root.

    names: of the drafters, by id
    """
    if not nodes:
        return TokenTree(*_ARRAYS_OF_NONE, names)
    indices = {id(node): index for index, node in enumerate(nodes)}
    rows = [
        (node.token, indices.get(id(node.parent), ROOT), node.position - root_position, node.source)
        for node in nodes
    ]
    attributed = [
        (index, *attribution)
        for index, node in enumerate(nodes)
        for attribution in node.attributions
    ]
    attributions = np.array([row[:4] for row in attributed], dtype=np.int32).reshape(-1, 4)
    return TokenTree(
        np.array(rows, dtype=np.int32),
        np.array([node.value for node in nodes]),
        attributions,
        np.array([row[4] for row in attributed], dtype=np.float32),
        names,
    )


_ARRAYS_OF_NONE = (
    NO_TREE.nodes,
    NO_TREE.values,
    NO_TREE.attributions,
    NO_TREE.attribution_log_probs,
)


def _share_out(parent: PipelinedNode) -> None:
    """The target goes through one child at most: estimates that say more are too high by as much.

    Trees that are verified at once need no more than an order; what is asked and sent behind these
    nodes goes by what they are worth.
    """
    total = sum(child.value for child in parent.children.values())
    if total > parent.value:
        for node in _subtrees(parent.children.values()):
            node.value *= parent.value / total


def _subtrees(nodes: Iterable[PipelinedNode]) -> list[PipelinedNode]:
    found = [*nodes]
    for node in found:
        found += node.children.values()
    return found


def _value(node: PipelinedNode) -> float:
    return node.value
