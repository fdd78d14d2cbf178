"""Drafting one request's tree, level by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

import numpy as np

from ...core.arrays import ROOT, Bool, Float32, Int32
from ...core.sampling import sampling_rows
from ...core.step.builder import block_tables, kv_slots
from ...core.steps import LogProbInput, StepInput, StepOutput, TreeRows
from ...core.tree.tree import pack
from ..coupled_rank import CoupledChoice, rank_siblings
from .expansion import Expansion
from .text_distribution import DraftDistribution, TextDistribution, TreeDraws
from .vocabulary.strategy import DraftVocabulary
from .vocabulary.target_noise import TargetNoise

# With a temperature the noise may raise a token that is unlikely: so many times the candidates
# are looked at.
OVERSAMPLE = 4


@dataclass(slots=True)
class TreeJob:
    """One tree on its way, whose root, the last committed token, is fed.

    text_len       the drafter's own tokens of the text, all in the cache
    next_position  position of the nodes of the first level as their noise counts
    blocks         KV blocks of the request, with room for every node that is fed
    draws          None: candidates are the most probable tokens, and no draws
    log_confidences  log-probability that what is drafted after a node is accepted, by node, where
                   the model estimates it
    stop_below     no candidates are taken after a node of less
    fed            nodes whose KV stands behind the text's, in the order of their slots
    declared       what each node was drawn from
    target_noise   of other vocabularies: that of what candidates become in the target's tokens
    """

    expansion: Expansion
    text_len: int
    next_position: int
    blocks: Sequence[int]
    distribution: TextDistribution
    vocabulary: DraftVocabulary
    draws: TreeDraws | None = None
    log_confidences: Mapping[int, float] = field(default_factory=dict)
    stop_below: float = -inf
    fed: list[int] = field(default_factory=list)
    declared: list[DraftDistribution] = field(default_factory=list)
    target_noise: TargetNoise | None = None

    @property
    def has_end(self) -> bool:
        """Whether it ends where the model's confidence is low."""
        return self.stop_below > -inf

    @property
    def reach(self) -> float:
        """How probable it is that the text goes through what the next level is drafted behind."""
        return self.expansion.reach

    @property
    def num_top(self) -> int:
        """Number of most probable tokens to look at after a node."""
        if self.draws is not None:
            return self.draws.size
        if self.target_noise is not None:
            return self.target_noise.num_looked_at
        return self.expansion.num_candidates * (
            OVERSAMPLE if self.distribution.temperature > 0 else 1
        )

    def take(self, output: StepOutput, first: int) -> None:
        """Grow the tree by the model's results for its frontier, whose rows begin at `first`."""
        if self.draws is not None:
            self._draw(self.draws, output, first)
            return
        frontier = self.expansion.frontier
        ids, log_probs = self._candidates(output, slice(first, first + len(frontier)))
        for place, node in enumerate(frontier):
            if self._stops(node):
                ids[place], log_probs[place] = [], []
        self.expansion.grow(ids, log_probs)

    def proposed(self, max_nodes: int) -> tuple[Int32, Int32, Float32]:
        """Tokens, parents and log-probabilities of at most so many nodes, as in `Proposal`.

        What was drawn is never left out for what it is.
        """
        grown = self.expansion
        return grown.best(max_nodes) if self.draws is None else grown.first(max_nodes)

    def _draw(self, draws: TreeDraws, output: StepOutput, first: int) -> None:
        expansion = self.expansion
        ranks = [expansion.ranks(node) for node in expansion.frontier]
        # The earlier draws decide whether there are draws, never the draws themselves.
        drawn = [
            [] if self._stops(node) else draws.candidates(output, row, own[-1] + 1)
            for row, (node, own) in enumerate(zip(expansion.frontier, ranks, strict=True), first)
        ]
        expansion.grow(
            [[one.token for one in tokens] for tokens in drawn],
            [[one.log_prob for one in tokens] for tokens in drawn],
        )
        # Nodes are added in the order of the frontier and, after one of it, of the ranks.
        self.declared += [
            tokens[rank].distribution
            for own, tokens in zip(ranks, drawn, strict=True)
            for rank in own
            if rank < len(tokens)
        ]
        assert len(self.declared) == len(expansion.tokens)

    def _stops(self, node: int) -> bool:
        return self.log_confidences.get(node, 0.0) < self.stop_below

    def _candidates(
        self, output: StepOutput, rows: slice
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The candidates after each node of the frontier, ranked with the request's noise, and
        their log-probabilities.

        What the model itself would choose is always among them, however unlikely it was.
        """
        top, frontier = output.log_probs.top, self.expansion.frontier
        assert top is not None
        count = self.expansion.num_candidates
        tokens, log_probs = top.ids[rows, : self.num_top], top.log_probs[rows, : self.num_top]
        if self.target_noise is not None:
            ranked = [
                self.target_noise.rank(self._path(node), own, given, count)
                for node, own, given in zip(frontier, tokens, log_probs, strict=True)
            ]
            return [ids.tolist() for ids, _ in ranked], [given.tolist() for _, given in ranked]
        if self.distribution.temperature == 0:
            # They are ranked already.
            return tokens.tolist(), np.minimum(log_probs, 0.0).tolist()
        chosen, of_chosen = output.target_tokens[rows, None], output.log_probs.of_targets
        assert of_chosen is not None
        is_known = (tokens == chosen).any(axis=1)
        own = np.where(is_known, np.float32(-inf), of_chosen[rows])
        tokens = np.concatenate([tokens, chosen], axis=1)
        log_probs = np.concatenate([log_probs, own[:, None]], axis=1)
        depths = np.array([[self.expansion.depth(node)] for node in frontier], dtype=np.int32)
        choice = CoupledChoice(
            self.distribution.temperature, self.distribution.seed, self.next_position
        )
        kept, given = rank_siblings(log_probs, tokens, depths, choice, min(count, top.ids.shape[1]))
        return np.take_along_axis(tokens, kept, axis=1).tolist(), given.tolist()

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(self.expansion.tokens[node])
            node = self.expansion.parents[node]
        return path[::-1]

    def feed_frontier(self) -> None:
        """Note that the frontier's KV has been written."""
        self.fed.extend(self.expansion.frontier)

    def noise_position(self, node: int) -> int:
        """Position of what follows a node as its noise counts."""
        return self.next_position + self.expansion.depth(node)

    def mask(self) -> Bool:
        """bool [frontier, fed + frontier]: a node sees its ancestors and itself."""
        frontier = self.expansion.frontier
        columns = {node: column for column, node in enumerate([*self.fed, *frontier])}
        mask = np.zeros((len(frontier), len(columns)), dtype=np.bool_)
        for row, node in enumerate(frontier):
            ancestor = node
            while ancestor != ROOT:
                mask[row, columns[ancestor]] = True
                ancestor = self.expansion.parents[ancestor]
        return mask

    def rows(self, block_size: int) -> TreeRows:
        """What the frontier sees of itself and of the nodes that were fed before."""
        nodes = [*self.fed, *self.expansion.frontier]
        places = np.arange(self.text_len, self.text_len + len(nodes), dtype=np.int32)
        table = np.array([self.blocks], dtype=np.int32)
        depths = [self.expansion.depth(node) for node in nodes]
        return TreeRows(
            ancestors=pack(self.mask()),
            slots=kv_slots(table, np.zeros_like(places), places, block_size),
            # The root stands at the text's last position.
            positions=np.array(depths, dtype=np.int32) + np.int32(self.text_len - 1),
        )


def build_tree_step(jobs: Sequence[TreeJob], block_size: int) -> StepInput:
    """The step that feeds the frontiers of all jobs."""
    frontiers = [job.expansion.frontier for job in jobs]
    counts = [len(frontier) for frontier in frontiers]
    trees = [job.rows(block_size) for job in jobs]
    pairs = list(zip(trees, counts, strict=True))
    distributions = [job.distribution for job in jobs]
    tokens = [
        job.vocabulary.fed(job.expansion.tokens[node])
        for job, frontier in zip(jobs, frontiers, strict=True)
        for node in frontier
    ]
    noise_positions = [
        job.noise_position(node)
        for job, frontier in zip(jobs, frontiers, strict=True)
        for node in frontier
    ]
    return StepInput(
        step_id=0,
        moves=np.empty((0, 2), dtype=np.int32),
        token_ids=np.array(tokens, dtype=np.int32),
        positions=np.concatenate([tree.positions[-count:] for tree, count in pairs]),
        slots=np.concatenate([tree.slots[-count:] for tree, count in pairs]),
        request_starts=np.array([0, *accumulate(counts)], dtype=np.int32),
        context_lens=np.array([job.text_len for job in jobs], dtype=np.int32),
        block_tables=block_tables([job.blocks for job in jobs]),
        trees=tuple(trees),
        logits_rows=np.arange(len(tokens), dtype=np.int32),
        sampling=sampling_rows(
            [distribution.temperature for distribution in distributions],
            [distribution.logits_params for distribution in distributions],
            [distribution.seed for distribution in distributions],
            np.array(noise_positions, dtype=np.int64),
            np.array(counts, dtype=np.int32),
        ),
        log_probs=LogProbInput(of_targets=True, num_top=max(job.num_top for job in jobs)),
    )
