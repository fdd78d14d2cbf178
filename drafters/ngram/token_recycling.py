"""Token Recycling: drafts from what the target found probable after the same tokens before.

Luo et al., ACL 2025 (arXiv 2408.08696), "Turning Trash into Treasure". A table keeps the target's
most probable next tokens after each token, those of rejected nodes too; a static tree is read out
of it, token by token. Needs no training. See docs/drafters.md, "Token Recycling".
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from ...core.arrays import ROOT, Int32
from ...core.errors import ConfigError, DrafterError
from ...core.proposals import (
    MAX_TOP_NEXT_TOKENS,
    Commit,
    DraftRequest,
    Proposal,
    Query,
    TopNextTokens,
    empty_proposal,
)
from ..open_requests import StatefulDrafter
from ..option_checks import require_switches, require_whole
from ..tree_shape import read_tree_shape

MAX_TEMPLATE_NODES = 256
# The candidate of rank r, from 1, is taken for right in so many cases: SHARE * r ** -FALL.
SHARE = 0.36
FALL = 2.2
UNKNOWN = -1


class TemplateNode(NamedTuple):
    """One node of the template.

    parent  0 is the root, i + 1 is node i of the template
    rank    index among the parent's candidates, best first, from 0
    """

    parent: int
    rank: int


@lru_cache(maxsize=2 * MAX_TEMPLATE_NODES)
def tree_template(num_nodes: int, num_candidates: int) -> tuple[TemplateNode, ...]:
    """At most `num_nodes` nodes of at most `num_candidates` children each, the best ones first.

    So a prefix of a template is the template of fewer nodes.
    """
    # Of each node that may come next: its value, negated, and itself.
    frontier = [(-1.0, TemplateNode(0, 0))]
    nodes: list[TemplateNode] = []
    while frontier and len(nodes) < min(num_nodes, MAX_TEMPLATE_NODES):
        value, node = heapq.heappop(frontier)
        parent, rank = node
        nodes.append(node)
        heapq.heappush(frontier, (value * SHARE, TemplateNode(len(nodes), 0)))
        if rank + 1 < num_candidates:
            fall = ((rank + 2) / (rank + 1)) ** -FALL
            heapq.heappush(frontier, (value * fall, TemplateNode(parent, rank + 1)))
    return tuple(nodes)


class SuccessorTable:
    """token -> its `num_top_next_tokens` most probable next tokens, where it was seen last.

    A matrix that grows with the ids that occur. Ids from `max_vocab` on are refused.
    """

    __slots__ = ("_ids", "_max_vocab")

    def __init__(self, num_top_next_tokens: int, max_vocab: int) -> None:
        self._max_vocab = max_vocab
        # The last row is never learned. It is the one that UNKNOWN indexes, so what comes after an
        # unknown token is unknown without a question.
        self._ids = np.full((1, num_top_next_tokens), UNKNOWN, dtype=np.int32)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the matrix."""
        return self._ids.nbytes

    def learn(self, top_next_tokens: TopNextTokens) -> None:
        """Replace what is known of these tokens; of equal ones the last counts.

        Raises `DrafterError` if the rows have another width, or an id is out of range.
        """
        tokens, ids = top_next_tokens.tokens, top_next_tokens.ids
        if ids.shape != (len(tokens), self._ids.shape[1]):
            raise DrafterError(
                f"{ids.shape[1]} top next tokens a token came, {self._ids.shape[1]} were wanted"
            )
        highest = int(max(tokens.max(initial=UNKNOWN), ids.max(initial=UNKNOWN)))
        if highest >= self._max_vocab:
            raise DrafterError(f"token {highest} is not below max_vocab, {self._max_vocab}")
        self._reserve(highest + 1)
        self._ids[tokens] = ids

    def expand(self, root: int, template: Iterable[TemplateNode]) -> tuple[list[int], list[int]]:
        """Tokens and parents, as in `Proposal`, of the template's nodes that are known."""
        tokens: list[int] = []
        parents: list[int] = []
        # Of the root and of each node of the template: its token, and its place in `tokens`.
        drafted = [root if root < len(self._ids) - 1 else UNKNOWN]
        places = [ROOT]
        rows: dict[int, list[int]] = {}
        for parent, rank in template:
            above = drafted[parent]
            row = rows.get(above)
            if row is None:
                row = rows[above] = self._ids[above].tolist()
            drafted.append(row[rank])
            places.append(len(tokens))
            if row[rank] != UNKNOWN:
                tokens.append(row[rank])
                parents.append(places[parent])
        return tokens, parents

    def _reserve(self, num_tokens: int) -> None:
        num_known = len(self._ids) - 1
        if num_tokens <= num_known:
            return
        # Doubling: ids come in any order, and each growth copies all.
        size = min(max(num_tokens, 2 * num_known), self._max_vocab)
        grown = np.full((size + 1, self._ids.shape[1]), UNKNOWN, dtype=np.int32)
        grown[:num_known] = self._ids[:num_known]
        self._ids = grown


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecyclingOptions:
    """Options of `TokenRecyclingDrafter`; raises `ConfigError` naming the option.

    num_top_next_tokens  next tokens kept for each token; a table takes 4 bytes for each
    tree                 JSON file of the static tree that is drafted through
                         (`drafters/tree_shape.py`); default: one that is as large as a step
                         takes
    share                requests of one namespace and cache salt use one table, which outlives
                         them; otherwise each request has its own
    max_tables           most tables that are shared; what was used least recently is forgotten
    max_vocab            token ids stay below
    """

    # These are fixed: users have no better values.
    FIXED: ClassVar[tuple[str, ...]] = ("share", "max_tables", "max_vocab")

    num_top_next_tokens: int = 8
    tree: str = ""
    share: bool = True
    max_tables: int = 16
    max_vocab: int = 2**20

    def __post_init__(self) -> None:
        require_whole("num_top_next_tokens", self.num_top_next_tokens, 1, MAX_TOP_NEXT_TOKENS)
        require_whole("max_tables", self.max_tables, 1)
        require_whole("max_vocab", self.max_vocab, 1)
        require_switches(self, "share")
        self.static_tree()

    def static_tree(self) -> tuple[TemplateNode, ...] | None:
        """The tree of the file, if one is named. Raises `ConfigError`."""
        if not self.tree:
            return None
        shape = read_tree_shape(Path(self.tree))
        if shape.num_candidates > self.num_top_next_tokens:
            raise ConfigError(
                "tree", f"has nodes of rank {shape.num_candidates}; raise num_top_next_tokens"
            )
        pairs = zip(shape.parents.tolist(), shape.ranks.tolist(), strict=True)
        return tuple(TemplateNode(parent + 1, rank) for parent, rank in pairs)


class _Request:
    """The last token of one request, and the table that serves it."""

    __slots__ = ("committed_len", "root", "table")

    def __init__(self, request: DraftRequest, table: SuccessorTable) -> None:
        self.committed_len = 0
        self.root = UNKNOWN
        self.table = table
        self.extend(request.token_ids)

    @property
    def memory_bytes(self) -> int:
        return self.table.memory_bytes

    def extend(self, tokens: Int32) -> None:
        self.committed_len += len(tokens)
        self.root = int(tokens[-1]) if len(tokens) else self.root


class TokenRecyclingDrafter(StatefulDrafter[_Request]):
    """Proposes a static tree of candidates of candidates, and asks for those of every tree.

    Serves engines of one target: what it knows of a token is the target's.
    """

    def __init__(
        self, name: str = "token_recycling", options: TokenRecyclingOptions | None = None
    ) -> None:
        super().__init__(name)
        self._options = options or TokenRecyclingOptions()
        self._static_tree = self._options.static_tree()
        # By namespace and cache salt; the latest last.
        self._tables: dict[tuple[str, str], SuccessorTable] = {}

    @property
    def memory_bytes(self) -> int:
        """Bytes of the shared tables, and of requests with tables of their own."""
        shared = sum(table.memory_bytes for table in list(self._tables.values()))
        return shared + (0 if self._options.share else self._requests.memory_bytes)

    def _state(self, request: DraftRequest) -> _Request:
        return _Request(request, self._table(request))

    def _learn(self, state: _Request, commit: Commit) -> None:
        if commit.top_next_tokens is not None:
            state.table.learn(commit.top_next_tokens)
        state.extend(commit.tokens)

    def _table(self, request: DraftRequest) -> SuccessorTable:
        options = self._options
        new = SuccessorTable(options.num_top_next_tokens, options.max_vocab)
        if not (options.share and request.store):
            return new
        key = (request.namespace, request.cache_salt)
        table = self._tables[key] = self._tables.pop(key, new)
        if len(self._tables) > options.max_tables:
            del self._tables[next(iter(self._tables))]
        return table

    def _propose(self, state: _Request, query: Query) -> Proposal:
        max_nodes = query.max_nodes
        if max_nodes <= 0:
            # Every row of the step is dear: no top next tokens are asked for either.
            return empty_proposal(self._name)
        num_top_next_tokens = self._options.num_top_next_tokens
        template = self._static_tree or tree_template(max_nodes, num_top_next_tokens)
        root = query.assumed[-1] if query.assumed else state.root
        tokens, parents = state.table.expand(root, template[:max_nodes])
        return Proposal(
            self._name,
            np.array(tokens, dtype=np.int32),
            np.array(parents, dtype=np.int32),
            np.zeros(len(tokens), dtype=np.float32),
            num_top_next_tokens=num_top_next_tokens,
        )
