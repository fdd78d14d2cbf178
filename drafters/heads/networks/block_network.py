"""How DFlash and DSpark read features and grow trees.

A block's rows fill in all levels in one pass; DSpark adds what the drafted tokens tell, level by
level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from ....core.arrays import ROOT
from ....models.heads.dflash import DFlash
from ....models.heads.dflash_config import DFlashConfig
from ....models.heads.dspark import DSpark
from ....models.heads.load_head import SharedParts
from .head_network import HeadTree, level_of_all, on_target, spoken_ids
from .kept_keys import KeptKeys


class DFlashNetwork:
    """A DFlash drafter: all nodes of a level have one distribution, which depends on text and root.

    Only keys and values of the text are kept; a block's own are thrown away with it.
    """

    says_all_levels = True

    def __init__(self, head: DFlash, shared: SharedParts) -> None:
        config = head.config
        self._head = head
        self._shared = shared
        self.num_layers = config.num_layers
        self.most_levels = config.draft_length
        self._dtype = next(head.parameters()).dtype
        self.device = next(head.parameters()).device
        # Rows of the target's embedding as they stand: a target that scales them does so itself.
        self._embedding = head.embed_tokens.weight if config.has_embedding else _table(shared)
        self._own_ids = None
        if config.has_token_map:
            own = torch.arange(config.draft_vocab_size, device=self.device)
            self._own_ids = own + head.d2t
        self.token_ids = spoken_ids(self._own_ids)

    def project(self, features: Tensor) -> Tensor:
        """What all layers read, once it is normed."""
        return self._head.project(features.to(self._dtype))

    def read(
        self, features: Tensor, tokens: Tensor, positions: Tensor, texts: Sequence[KeptKeys],
        counts: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """The rows' contexts, of features alone."""
        del tokens
        context = self._head.hidden_norm(features)
        for index, pair in enumerate(self._head.context_keys(context, positions)):
            parts = torch.stack(pair).split(list(counts), dim=1)
            for text, own in zip(texts, parts, strict=True):
                text.append(index, own)
        for text, count in zip(texts, counts, strict=True):
            text.num_rows += count
        return context

    def level(self, trees: Sequence[HeadTree]) -> Tensor:
        """All levels are drafted with the first."""
        return level_of_all(trees, self._all_levels)

    def _all_levels(self, trees: Sequence[HeadTree]) -> Iterable[Tensor]:
        drafts = self.drafts(trees)
        logits = self.own_logits(self.raw_logits(drafts.flatten(0, 1)))
        return logits.split(drafts.shape[1])

    def drafts(self, trees: Sequence[HeadTree]) -> Tensor:
        """[trees, draft_length, hidden_size]: normed states of the drafts' rows."""
        head, config = self._head, self._head.config
        roots = torch.tensor([tree.token for tree in trees], device=self.device)
        starts = torch.tensor([tree.job.text_len - 1 for tree in trees], device=self.device)
        positions = starts[:, None] + torch.arange(config.block_size, device=self.device)
        embeddings = torch.embedding(self._embedding, head.block(roots)) * config.embedding_scale
        attention = BlockAttention([tree.text for tree in trees], config)
        return head.drafts(head(embeddings, positions, attention))

    def raw_logits(self, states: Tensor) -> Tensor:
        """[rows, draft vocabulary] of states [rows, hidden_size]: what the output head says."""
        has_own = self._head.config.draft_vocab_size
        return self._head.lm_head(states) if has_own else self._shared.head(states)

    def own_logits(self, raw: Tensor) -> Tensor:
        """float32 [rows, n] of `token_ids`, by what the output head says."""
        logits = self._head.logits(raw)
        if self._own_ids is None or self.token_ids is not None:
            return logits
        return on_target(logits, self._own_ids, self._head.config.vocab_size)


class BlockAttention:
    """An `Attend` (`models/heads/head_layer.py`) of blocks, each behind a text of its own.

    Tokens of a text that nothing is kept of count for no window.
    """

    def __init__(self, texts: Sequence[KeptKeys], config: DFlashConfig) -> None:
        self._texts = texts
        self._config = config
        self._sees_all = not config.causal_layers and not config.windows

    def __call__(self, index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[blocks, block_size, heads, head_dim]: what each row attends to."""
        attended = torch.empty_like(queries)
        for block, text in enumerate(self._texts):
            seen = torch.stack([keys[block], values[block]])
            before = text.layer(index)
            if before is not None:
                seen = torch.cat([before, seen], dim=1)
            found = scaled_dot_product_attention(
                queries[block].transpose(0, 1)[None],
                seen[0].transpose(0, 1)[None],
                seen[1].transpose(0, 1)[None],
                attn_mask=self._mask(index, seen),
                enable_gqa=True,
            )
            attended[block] = found[0].transpose(0, 1)
        return attended

    def _mask(self, index: int, seen: Tensor) -> Tensor | None:
        """bool [block_size, kept rows and block_size]; None: all is seen."""
        if self._sees_all:
            return None
        places = torch.arange(seen.shape[1], device=seen.device)
        rows = places[-self._config.block_size :]
        return self._config.is_seen(index, rows[:, None] - places)


def _table(shared: SharedParts) -> Tensor:
    weight = shared.embed.weight
    assert isinstance(weight, Tensor)
    return weight


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
        return self.own_logits(raw + added)

    def _log_confidences(self, states: Tensor, before: Tensor) -> list[float]:
        """How sure the confidence head is of the drafts of rows behind the tokens `before`."""
        said = self._head.confidence_head(states, self._markov.markov_w1(before))
        return logsigmoid(said.float()).tolist()

    def _memory(self, tree: HeadTree, node: int) -> Tensor:
        """What the row before a node's left behind: that of its parent."""
        return self._first if node == ROOT else tree.said[tree.job.expansion.parents[node]]
