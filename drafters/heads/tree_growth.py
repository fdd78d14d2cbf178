"""Grows trees by a head's network, all requests in one pass a level.

`MeasuredShapes` is what Sequoia's trees follow: which drafts were right, and what rounds take.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.proposals import Proposal, empty_proposal
from ...core.sampling import sampling_rows
from ...core.steps import LogProbOutput, StepOutput, TopTokens
from ...kernels.sampling.reference import choose_tokens
from ...kernels.sampling.sampler import choose_sampler
from ..model.draft_costs import DraftCosts, PayingDepth
from ..model.expansion import StaticExpansion
from ..model.options import SEQUOIA
from ..model.sequoia import SequoiaShapes
from ..model.text_distribution import TextDistribution, TreeDraws, draft_rng, stacked
from ..model.tree_job import TreeJob
from ..model.vocabulary.strategy import SameVocabulary
from .networks.head_network import HeadNetwork, HeadTree
from .networks.kept_keys import KeptKeys
from .options import HeadOptions

# Drafts that wait for the text after them; the last stage is not notified of ended requests.
MOST_DRAFTS = 4096


class MeasuredShapes:
    """Shapes of one head's trees, by its own drafts and times (`drafters/model/sequoia.py`).

    A request is known by any key. What is between the drafts of one request is a verification;
    anything else may be idleness.
    """

    def __init__(self, *, is_one_pass: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`is_one_pass`: all levels together take one pass."""
        self._is_one_pass = is_one_pass
        self._clock = clock
        self._costs = DraftCosts()
        self._shapes = SequoiaShapes(self._costs, is_one_pass=is_one_pass)
        self._drafts: OrderedDict[Hashable, tuple[int, Proposal]] = OrderedDict()
        self._drafted: frozenset[Hashable] = frozenset()
        self._finished_at = self._level_at = 0.0
        # Of each request in the last round, on average.
        self._num_nodes = 0.0

    def expansion(self, depth: int, max_nodes: int) -> StaticExpansion:
        """The tree that brings most tokens a second, of at most so many levels and nodes."""
        return StaticExpansion(self._shapes.shape(max_nodes, depth))

    def started(self, keys: Collection[Hashable]) -> None:
        """A round of drafts for these requests begins."""
        if not self._drafted.isdisjoint(keys):
            self._shapes.note_verify(self._num_nodes, self._clock() - self._finished_at)

    def grows(self) -> None:
        """The first level is begun."""
        self._level_at = self._clock()

    def level_done(self, *, is_last: bool) -> None:
        """Another level of all trees is there."""
        if is_last or not self._is_one_pass:
            now = self._clock()
            self._costs.note_draw(now - self._level_at)
            self._level_at = now

    def finished(self, drafts: Mapping[Hashable, tuple[int, Proposal]]) -> None:
        """The round's drafts, by request, with the tokens of the texts that they stand behind."""
        for key, draft in drafts.items():
            self._drafts.pop(key, None)
            self._drafts[key] = draft
        while len(self._drafts) > MOST_DRAFTS:
            self._drafts.popitem(last=False)
        sizes = [len(proposal.tokens) for _, proposal in drafts.values()]
        self._num_nodes = sum(sizes) / max(len(sizes), 1)
        self._drafted = frozenset(drafts)
        self._finished_at = self._clock()

    def followed(self, key: Hashable, length: int, tokens: Sequence[int]) -> None:
        """Behind `length` tokens a text went on so: judges what was drafted there."""
        before, proposal = self._drafts.pop(key, (0, None))
        if proposal is not None and before == length:
            self._shapes.judge(proposal.tokens, proposal.parents, tokens)

    def forget_all(self) -> None:
        """All requests have ended."""
        self._drafts.clear()
        self._drafted = frozenset()

    def forget(self, key: Hashable) -> None:
        """The request has ended; an unknown one is ignored."""
        self._drafts.pop(key, None)


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
        self._options = options.of_head(is_parallel=network.is_parallel)
        self._sampler = choose_sampler(network.device)
        self._clock = clock
        self.num_passes = 0
        self.measured: MeasuredShapes | None = None
        if self._options.tree == SEQUOIA:
            self.measured = MeasuredShapes(is_one_pass=network.is_parallel, clock=clock)

    def begin(
        self, text: KeptKeys, last_token: int, output: Tensor, length: int,
        distribution: TextDistribution, max_nodes: int,
    ) -> HeadTree | None:  # fmt: skip
        """A tree behind a text of `length` tokens, whose last row has the `output` [1, width].

        None where it may have no node.
        """
        most = self._network.most_levels or self._options.num_tokens
        levels = min(most, max_nodes, self._options.num_tokens)
        choose = self._options if self.measured is None else self.measured
        expansion = choose.expansion(levels, max_nodes)
        if not expansion.frontier:
            return None
        draws = self._draws(distribution, length)
        log_confidences: dict[int, float] = {}
        job = TreeJob(
            expansion, length, length, (), distribution, self._vocabulary, draws, log_confidences,
            self._options.stop_below,
        )  # fmt: skip
        return HeadTree(
            job, last_token, text, output, levels, text.behind(), log_confidences=log_confidences
        )

    def grow(
        self,
        trees: Sequence[HeadTree],
        deadline: float | None = None,
        depth: PayingDepth | None = None,
    ) -> int:
        """Grow them level by level, until they are complete, the deadline passes, or another level
        does not pay by `depth`, which is ignored for heads that draft all levels at once, and for
        trees that are measured.

        The number of levels that took a pass each.
        """
        growing, num_levels = trees, 0
        if self._network.is_parallel or self.measured is not None:
            depth = None
        if self.measured is not None and growing:
            self.measured.grows()
        while growing and (deadline is None or self._clock() < deadline):
            jobs = [tree.job for tree in growing]
            if num_levels and depth is not None and not depth.goes_on(jobs):
                break
            if not (num_levels and self._network.is_parallel):
                self.num_passes += 1
            num_levels += 1
            output = self._output(growing, self._network.level(growing))
            first = 0
            for tree in growing:
                count = len(tree.job.expansion.frontier)
                tree.job.take(output, first)
                first += count
            growing = [tree for tree in growing if tree.job.expansion.frontier]
            if self.measured is not None:
                self.measured.level_done(is_last=not growing)
        return 0 if self._network.is_parallel else num_levels

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

    def _output(self, trees: Sequence[HeadTree], logits: Tensor) -> StepOutput:
        """What the requests would choose after each node, by the head's logits, and its best."""
        jobs, ids = [tree.job for tree in trees], self._network.token_ids
        log_probs = self._sampler.log_softmax(logits)
        best = log_probs.topk(min(max(job.num_top for job in jobs), logits.shape[1]), dim=-1)
        columns, values = best.indices, best.values
        if any(job.distribution.temperature > 0 for job in jobs):
            chosen = self._chosen(jobs, logits)[:, None]
        else:
            chosen = columns[:, :1]
        columns = torch.cat([chosen, columns], dim=1)
        values = torch.cat([log_probs.gather(1, chosen), values], dim=1)
        # Two copies: each is a wait for the device.
        tokens = (columns if ids is None else ids[columns]).int().cpu().numpy()
        given = values.cpu().numpy()
        top = TopTokens(tokens[:, 1:], given[:, 1:])
        return StepOutput(0, tokens[:, 0], log_probs=LogProbOutput(given[:, 0], top))

    def _chosen(self, jobs: Sequence[TreeJob], logits: Tensor) -> Tensor:
        """int64 [rows]: the column that the requests would choose after each node."""
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
        ids = self._network.token_ids
        if ids is None:
            chosen = self._sampler.choose(logits, sampling)
        else:
            chosen = choose_tokens(logits, sampling, ids)
        # A head's logits may be anything: its drafts are checked.
        return chosen.clamp(min=0).long()
