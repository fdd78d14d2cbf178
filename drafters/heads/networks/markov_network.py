"""How DSpark grows trees: a block in one pass, then what tokens add, level by level."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ....core.arrays import ROOT
from ....models.heads.dspark import DSpark
from ....models.heads.load_head import SharedParts
from .block_network import DFlashNetwork
from .head_network import HeadTree


class DSparkNetwork(DFlashNetwork):
    """A DSpark drafter: nodes of a level have logits of their own, by the tokens on their paths."""

    says_all_levels = False
    _head: DSpark

    def __init__(self, head: DSpark, shared: SharedParts) -> None:
        super().__init__(head, shared)
        assert head.markov_head is not None
        self._markov = head.markov_head
        self._size = head.config.hidden_size
        self._first = head.fc.weight.new_zeros(self._markov.markov_w1.embedding_dim)

    def level(self, trees: Sequence[HeadTree]) -> Tensor:
        """The block is drafted with the first level; a node's row says what its children are."""
        new = [tree for tree in trees if tree.job.expansion.frontier == [ROOT]]
        if new:
            drafts = self.drafts(new)
            raw = self.raw_logits(drafts.flatten(0, 1)).unflatten(0, drafts.shape[:2])
            for tree, states, logits in zip(new, drafts, raw, strict=True):
                # From here on what stands for the text are the block's states and logits.
                tree.root = torch.cat([states, logits], dim=-1)
        rows, tokens, memories = [], [], []
        for tree in trees:
            expansion = tree.job.expansion
            for node in expansion.frontier:
                rows.append(tree.root[expansion.depth(node)])
                tokens.append(tree.token if node == ROOT else expansion.tokens[node])
                memories.append(self._memory(tree, node))
        states, raw = torch.stack(rows).tensor_split([self._size], dim=-1)
        before = torch.tensor(tokens, device=self.device)
        added, memory = self._markov(states, before, torch.stack(memories))
        nodes = [(tree, node) for tree in trees for node in tree.job.expansion.frontier]
        for (tree, node), own in zip(nodes, memory, strict=True):
            tree.said[node] = own
        if self._head.config.confidence_size:
            sure = self._log_confidences(states, before)
            for (tree, node), own in zip(nodes, sure, strict=True):
                tree.sure[node] = own
        return self.on_target(raw + added)

    def _log_confidences(self, states: Tensor, before: Tensor) -> list[float]:
        """How sure the confidence head is of the drafts of rows behind the tokens `before`."""
        said = self._head.confidence_head(states, self._markov.markov_w1(before))
        return logsigmoid(said.float()).tolist()

    def _memory(self, tree: HeadTree, node: int) -> Tensor:
        """What the row before a node's left behind: that of its parent."""
        return self._first if node == ROOT else tree.said[tree.job.expansion.parents[node]]
