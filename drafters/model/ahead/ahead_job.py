"""Drafting ahead for one request, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ....core.arrays import ROOT, Float32, Int32
from ....core.proposals import MAX_PROPOSAL_NODES, AheadQuery, Proposal
from ....core.steps import StepOutput
from ...coupled_rank import CoupledChoice
from ..cached_text import CachedText
from ..tree_step import TreePart, ranked_tokens
from .agreement import Agreement
from .branches import Growing
from .fed_tree import FedTree
from .outcomes import Candidates, Outcome, likeliest_outcomes

# Makes the drafts behind outcomes, given the tokens from the text to each.
MakeBranches = Callable[[CachedText, AheadQuery, Sequence[tuple[int, ...]]], Sequence[Growing]]


@dataclass(slots=True, eq=False)
class Branch:
    """An outcome with its draft.

    is_over  it grows no more
    nodes    of the fed tree, by those of the draft; `ROOT` is the outcome's token
    """

    outcome: Outcome
    draft: Growing
    is_over: bool = False
    nodes: dict[int, int] = field(default_factory=dict)


class AheadJob:
    """The tree that is verified is read in one pass, with what the cache lacks of the text. From
    then on each pass goes on with the drafts behind all outcomes at once.

    num_candidates  most probable tokens that are looked at after a node of the tree
    num_outcomes    most drafts
    agreement       what the target makes of the drafter's probabilities
    """

    def __init__(
        self, query: AheadQuery, state: CachedText, make_branches: MakeBranches, *,
        num_candidates: int, num_outcomes: int, agreement: Agreement,
    ) -> None:  # fmt: skip
        self.query = query
        self.state = state
        self._make_branches = make_branches
        self._num_candidates = num_candidates
        self._num_outcomes = num_outcomes
        self._agreement = agreement
        self._parents = query.parents.tolist()
        position = state.rewind()
        self.fed = FedTree(position, state.blocks)
        parent = ROOT
        for token in state.tokens[position:]:
            parent = self.fed.add(token, parent)
        self._root = parent
        for token, above in zip(query.tokens.tolist(), self._parents, strict=True):
            self.fed.add(token, self._root + 1 + above)
        self._branches: list[Branch] | None = None
        # Drafts whose rows the next pass has, and how many each.
        self._growing: list[tuple[Branch, int]] = []

    @property
    def has_read(self) -> bool:
        """Whether the tree's pass is done."""
        return self._branches is not None

    @property
    def num_top(self) -> int:
        """Number of most probable tokens that the next pass tells after a row."""
        if not self.has_read:
            return self._num_candidates
        return max((branch.draft.num_top for branch, _ in self._growing), default=0)

    @property
    def first_wanted(self) -> int:
        """The first fed node whose next token is looked at, of those of the next pass."""
        return self.fed.num_fed if self.has_read else self._root

    def prepare(self, max_rows: int) -> bool:
        """Choose what the next pass feeds, at most so many rows; whether that is anything.

        Drafts behind less probable outcomes end where there is no room for their rows.
        """
        if self._branches is None:
            return True
        self._growing, room = [], max_rows
        for branch in self._branches:
            frontier = list(branch.draft.expansion.frontier)
            branch.is_over = branch.is_over or not frontier or len(frontier) > room
            if branch.is_over:
                continue
            room -= len(frontier)
            for node in frontier:
                branch.nodes[node] = self._feed(branch, node)
            self._growing.append((branch, len(frontier)))
        return bool(self._growing)

    def part(self, block_size: int) -> TreePart:
        """What `prepare` has chosen as a part of the next pass."""
        rows = self.fed.rows(block_size)
        return TreePart(
            self.fed.tokens[self.fed.num_fed :],
            rows,
            self.fed.context_len,
            self.state.blocks,
            self.state.distribution,
            (rows.positions[self.first_wanted :] + 1).tolist(),
        )

    def take(self, output: StepOutput, first: int) -> int:
        """Go on by the results of a pass, whose wanted rows begin at `first`; how many it has."""
        count = len(self.fed) - self.first_wanted
        if self._branches is None:
            self._branches = self._begin(output, first)
        else:
            row = first
            for branch, num_rows in self._growing:
                branch.draft.take(output, row)
                row += num_rows
        self.fed.num_fed = len(self.fed)
        return count

    def proposal(self, source: str) -> Proposal:
        """The paths to all outcomes, and the drafts behind them."""
        tokens: list[int] = []
        parents: list[int] = []
        log_probs: list[float] = []
        places = {ROOT: ROOT}
        for outcome, drafted in self._drafted():
            path = [node for node in self._path(outcome.node) if node not in places]
            if len(tokens) + len(path) + 1 + len(drafted[0]) > MAX_PROPOSAL_NODES:
                break
            for node in path:
                places[node] = len(tokens)
                parents.append(places[self._parents[node]])
                tokens.append(int(self.query.tokens[node]))
            parents.append(places[outcome.node])
            first = len(tokens)
            tokens += [outcome.token, *drafted[0].tolist()]
            parents += [first + 1 + parent for parent in drafted[1].tolist()]
            # Nobody asks how probable the way to a draft was.
            log_probs += [*[0.0] * (len(path) + 1), *drafted[2].tolist()]
        return Proposal(
            source,
            np.array(tokens, dtype=np.int32),
            np.array(parents, dtype=np.int32),
            np.array(log_probs, dtype=np.float32),
        )

    def first_path(self) -> list[int]:
        """Tokens of the tree that stand behind the text's in the cache, one after the other."""
        tokens = self.query.tokens.tolist()
        chain = [above == node - 1 for node, above in enumerate(self._parents)]
        return tokens[: chain.index(False)] if False in chain else tokens

    def _begin(self, output: StepOutput, first: int) -> list[Branch]:
        rows = range(first, first + len(self._parents) + 1)
        candidates = [
            self._candidates(output, row, self.fed.position(self._root + place) + 1)
            for place, row in enumerate(rows)
        ]
        self._agreement.ask(self.query, candidates)
        outcomes = likeliest_outcomes(
            self.query.tokens.tolist(),
            self._parents,
            [self._agreement.corrected(one) for one in candidates],
            self._num_outcomes,
        )
        paths = [
            (*(int(self.query.tokens[node]) for node in self._path(outcome.node)), outcome.token)
            for outcome in outcomes
        ]
        drafts = self._make_branches(self.state, self.query, paths)
        return [Branch(outcome, draft) for outcome, draft in zip(outcomes, drafts, strict=True)]

    def _candidates(self, output: StepOutput, row: int, next_position: int) -> Candidates:
        distribution = self.state.distribution
        choice = CoupledChoice(distribution.temperature, distribution.seed, next_position)
        count = self._num_candidates
        return Candidates(*ranked_tokens(output, row, count, choice, count + 1))

    def _feed(self, branch: Branch, node: int) -> int:
        if node == ROOT:
            return self.fed.add(branch.outcome.token, self._root + 1 + branch.outcome.node)
        expansion = branch.draft.expansion
        return self.fed.add(expansion.tokens[node], branch.nodes[expansion.parents[node]])

    def _path(self, node: int) -> list[int]:
        """Nodes of the tree down to this one."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self._parents[node]
        return path[::-1]

    def _drafted(self) -> Iterator[tuple[Outcome, tuple[Int32, Int32, Float32]]]:
        """Outcomes with drafts behind them."""
        for branch in self._branches or ():
            drafted = branch.draft.proposed(self.query.max_nodes)
            if len(drafted[0]):
                yield branch.outcome, drafted
