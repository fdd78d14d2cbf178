"""How DFlash and DSpark read features and grow trees.

A block's rows fill in all levels in one pass; DSpark adds a bias by the drafted tokens, level by
level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from ....core.arrays import ROOT
from ....models.heads.dflash import DFlash
from ....models.heads.dflash_config import DFlashConfig, RowView
from ....models.heads.dspark import DSpark
from ....models.heads.head_layer import Attend
from ....models.heads.load_head import SharedParts
from .head_network import HeadTree, ParallelNetwork, TextEnds, drafted_ids, ends_of, on_target
from .kept_keys import KeptKeys


class BlockNetwork:
    """A head that drafts by blocks.

    Only keys and values of the text are kept; a block's own are thrown away with it.
    """

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
        self.token_ids = drafted_ids(self._own_ids)

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

    def num_behind(self, levels: int) -> int:  # noqa: ARG002 - a block has them all
        """Rows of a block."""
        return self._head.config.block_size

    def view(self, layer: int) -> RowView:
        """What the rows of a block see in a layer."""
        return self._head.config.view(layer)

    def states_of_levels(self, ends: TextEnds, levels: int, attend: Attend) -> Tensor:
        """[texts, levels, hidden_size]: normed states of the rows that predict drafts."""
        head, config = self._head, self._head.config
        positions = ends.positions[:, None] + torch.arange(config.block_size, device=self.device)
        embeddings = torch.embedding(self._embedding, head.block(ends.tokens))
        states = head(embeddings * config.embedding_scale, positions, attend)
        return head.drafts(states)[:, :levels]

    def states_of(self, trees: Sequence[HeadTree]) -> Tensor:
        """`states_of_levels` behind the texts of trees, as many as the highest of them has."""
        attention = BlockAttention([tree.text for tree in trees], self._head.config)
        levels = max(tree.levels for tree in trees)
        return self.states_of_levels(ends_of(trees, self.device), levels, attention)

    def raw_logits(self, states: Tensor) -> Tensor:
        """[rows, draft vocabulary]: the output head's logits of states [rows, hidden_size]."""
        has_own = self._head.config.draft_vocab_size
        return self._head.lm_head(states) if has_own else self._shared.head(states)

    def logits(self, raw: Tensor) -> Tensor:
        """float32 [rows, vocabulary] of all the target's tokens, from `raw_logits`."""
        logits = self._head.logits(raw)
        if self._own_ids is None:
            return logits
        return on_target(logits, self._own_ids, self._head.config.vocab_size)

    def own_logits(self, raw: Tensor) -> Tensor:
        """float32 [rows, n] of `token_ids`."""
        return self.logits(raw) if self.token_ids is None else self._head.logits(raw)


class DFlashNetwork(BlockNetwork, ParallelNetwork):
    """A DFlash drafter: all nodes of a level have one distribution, which depends on text and
    root."""

    def logits_of_levels(self, ends: TextEnds, levels: int, attend: Attend) -> Tensor:
        """As `ParallelNetwork`."""
        states = self.states_of_levels(ends, levels, attend)
        return self.logits(self.raw_logits(states.flatten(0, 1))).unflatten(0, states.shape[:2])

    def _all_levels(self, trees: Sequence[HeadTree]) -> Iterable[Tensor]:
        states = self.states_of(trees)
        return self.own_logits(self.raw_logits(states.flatten(0, 1))).split(states.shape[1])


class BlockAttention:
    """An `Attend` (`models/heads/head_layer.py`) of blocks, each behind a text of its own.

    Distances count kept rows: where rows of a text are missing, a window reaches further back.
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
        return self._config.view(index).sees(rows[:, None] - places)


def _table(shared: SharedParts) -> Tensor:
    weight = shared.embed.weight
    assert isinstance(weight, Tensor)
    return weight


class DSparkNetwork(BlockNetwork):
    """A DSpark drafter: nodes of a level have logits of their own, by the tokens on their paths."""

    is_parallel = False
    _head: DSpark

    def __init__(self, head: DSpark, shared: SharedParts) -> None:
        super().__init__(head, shared)
        assert head.markov_head is not None
        self._markov = head.markov_head
        self._size = head.config.hidden_size
        # What stands for the memory of a root.
        self.first_memory = head.fc.weight.new_zeros(self._markov.markov_w1.embedding_dim)

    @property
    def has_confidence(self) -> bool:
        """Whether it estimates the confidence of each draft."""
        return self._head.config.confidence_size > 0

    def with_tokens(
        self, states: Tensor, raw: Tensor, tokens: Tensor, memories: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[rows, draft vocabulary]: raw logits plus the tokens' bias; and new memories.

        states    [rows, hidden_size]  of the level
        raw       [rows, draft vocabulary]  `raw_logits` of these
        tokens    int64 [rows]  behind which the level's nodes stand
        memories  [rows, rank]  of the rows of these tokens
        """
        added, memories = self._markov(states, tokens, memories)
        return raw + added, memories

    def level(self, trees: Sequence[HeadTree]) -> Tensor:
        """The first level drafts the block; a node's row has the logits of its children."""
        new = [tree for tree in trees if tree.job.expansion.frontier == [ROOT]]
        if new:
            drafts = self.states_of(new)
            raw = self.raw_logits(drafts.flatten(0, 1)).unflatten(0, drafts.shape[:2])
            for tree, states, logits in zip(new, drafts, raw, strict=True):
                # From here on what stands for the text are the block's states and logits. On GPUs
                # the target's head gives float32, to which states of 16 bits are widened here.
                tree.root = torch.cat([states, logits], dim=-1)
        rows, tokens, memories = [], [], []
        for tree in trees:
            expansion = tree.job.expansion
            for node in expansion.frontier:
                rows.append(tree.root[expansion.depth(node)])
                tokens.append(tree.token if node == ROOT else expansion.tokens[node])
                memories.append(self._memory(tree, node))
        states, raw = torch.stack(rows).tensor_split([self._size], dim=-1)
        states = states.to(self._dtype)
        before = torch.tensor(tokens, device=self.device)
        raw, memory = self.with_tokens(states, raw, before, torch.stack(memories))
        nodes = [(tree, node) for tree in trees for node in tree.job.expansion.frontier]
        for (tree, node), own in zip(nodes, memory, strict=True):
            tree.outputs[node] = own
        if self.has_confidence and any(tree.job.has_end for tree in trees):
            confidences = self._log_confidences(states, before)
            for (tree, node), own in zip(nodes, confidences, strict=True):
                tree.log_confidences[node] = own
        return self.own_logits(raw)

    def _log_confidences(self, states: Tensor, before: Tensor) -> list[float]:
        """Log-confidences of the drafts of rows behind the tokens `before`."""
        logits = self._head.confidence_head(states, self._markov.markov_w1(before))
        return logsigmoid(logits.float()).tolist()

    def _memory(self, tree: HeadTree, node: int) -> Tensor:
        """What the row before a node's left behind: that of its parent."""
        return self.first_memory if node == ROOT else tree.outputs[tree.job.expansion.parents[node]]
