"""Grows trees by a head's network, all requests in one pass a level."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.proposals import Proposal, empty_proposal
from ...core.sampling import sampling_rows
from ...core.steps import LogProbOutput, StepOutput, TopTokens
from ...models.sampling import choose_sampler
from ..model.options import SEQUOIA
from ..model.stopping.depth import PayingDepth
from ..model.text_distribution import TextDistribution, draft_rng, stacked
from ..model.tree_draws import TreeDraws
from ..model.tree_job import TreeJob
from ..model.vocabulary.strategy import SameVocabulary
from .measured_shapes import MeasuredShapes
from .networks.head_network import HeadNetwork, HeadTree
from .networks.kept_keys import KeptKeys
from .options import HeadOptions


class TreeGrowth:
    """Trees of one head.

    name     the `source` of its proposals
    options  as they are given; `auto` is decided here
    clock    of the deadlines, and of how long a level takes, seconds

    `measured` is for Sequoia's trees alone, and observes drafts and texts;
    `num_passes` of the network were taken so far.
    """

    def __init__(
        self,
        network: HeadNetwork,
        vocab_size: int,
        name: str,
        options: HeadOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `ConfigError` (`tree`)."""
        self._network = network
        self._vocab_size = vocab_size
        self._vocabulary = SameVocabulary(vocab_size)
        self._name = name
        self._options = options.of_head(says_all_levels=network.says_all_levels)
        self._sampler = choose_sampler(network.device)
        self._clock = clock
        self.num_passes = 0
        self.measured: MeasuredShapes | None = None
        if self._options.tree == SEQUOIA:
            self.measured = MeasuredShapes(
                self._options, is_one_pass=network.says_all_levels, clock=clock
            )

    def begin(
        self, text: KeptKeys, last_token: int, said: Tensor, length: int,
        distribution: TextDistribution, max_nodes: int,
    ) -> HeadTree | None:  # fmt: skip
        """A tree behind a text of `length` tokens, whose last row said [1, width].

        None where it may have no node.
        """
        most = self._network.most_levels or self._options.num_tokens
        levels = min(most, max_nodes, self._options.num_tokens)
        choose = self._options if self.measured is None else self.measured
        expansion = choose.expansion(levels, max_nodes)
        if not expansion.frontier:
            return None
        draws = self._draws(distribution, length)
        sure: dict[int, float] = {}
        job = TreeJob(
            expansion, length, length, (), distribution, self._vocabulary, draws, sure,
            self._options.weighs_confidence, self._options.stop_below,
        )  # fmt: skip
        kept = KeptKeys(self._network.num_layers)
        return HeadTree(job, last_token, text, said, levels, kept, sure=sure)

    def grow(
        self,
        trees: Sequence[HeadTree],
        deadline: float | None = None,
        depth: PayingDepth | None = None,
    ) -> int:
        """Grow them level by level, until they are complete, the deadline passes, or `depth` says
        that another level does not pay; of heads that say all levels at once, and of trees that are
        measured, all are drafted.

        The number of levels that took a pass each.
        """
        growing, num_levels = trees, 0
        if self._network.says_all_levels or self.measured is not None:
            depth = None
        if self.measured is not None and growing:
            self.measured.grows()
        while growing and (deadline is None or self._clock() < deadline):
            jobs = [tree.job for tree in growing]
            if num_levels and depth is not None and not depth.goes_on(jobs):
                break
            if not (num_levels and self._network.says_all_levels):
                self.num_passes += 1
            num_levels += 1
            output = self._chosen(growing, self._network.level(growing))
            first = 0
            for tree in growing:
                count = len(tree.job.expansion.frontier)
                tree.job.take(output, first)
                first += count
            growing = [tree for tree in growing if tree.job.expansion.frontier]
            if self.measured is not None:
                self.measured.level_done(is_last=not growing)
        return 0 if self._network.says_all_levels else num_levels

    def proposal(self, tree: HeadTree | None, max_nodes: int) -> Proposal:
        """At most so many of a tree's nodes; none of no tree."""
        if tree is None:
            return empty_proposal(self._name)
        nodes = tree.job.proposed(max_nodes)
        declared = stacked(tree.job.declared[: len(nodes[0])])
        return Proposal(self._name, *nodes, distributions=declared)

    def _draws(self, distribution: TextDistribution, length: int) -> TreeDraws | None:
        """None where candidates are no draws."""
        options = self._options
        if not options.is_drawn or distribution.temperature == 0:
            return None
        return TreeDraws(
            min(options.distribution_size, self._vocab_size),
            distribution.temperature,
            draft_rng(self._name, distribution.seed, length),
        )

    def _chosen(self, trees: Sequence[HeadTree], logits: Tensor) -> StepOutput:
        """What the requests would choose after each node, by the head's logits."""
        jobs = [tree.job for tree in trees]
        counts = [len(job.expansion.frontier) for job in jobs]
        positions = [
            job.next_position + job.expansion.depth(node)
            for job in jobs
            for node in job.expansion.frontier
        ]
        sampling = sampling_rows(
            [job.distribution.temperature for job in jobs],
            [job.distribution.logits_params for job in jobs],
            [job.distribution.seed for job in jobs],
            np.array(positions, dtype=np.int64),
            np.array(counts, dtype=np.int32),
        )
        # A head's logits may be anything: its drafts are checked.
        targets = self._sampler.choose(logits, sampling).clamp(min=0)
        log_probs = self._sampler.log_softmax(logits)
        best = log_probs.topk(min(max(job.num_top for job in jobs), self._vocab_size), dim=-1)
        chosen = log_probs.gather(-1, targets.long()[:, None])
        # Two copies: each is a wait for the device.
        ids = torch.cat([targets.int()[:, None], best.indices.int()], dim=1).cpu().numpy()
        values = torch.cat([chosen, best.values], dim=1).cpu().numpy()
        top = TopTokens(ids[:, 1:].copy(), values[:, 1:].copy())
        return StepOutput(0, ids[:, 0].copy(), log_probs=LogProbOutput(values[:, 0].copy(), top))
