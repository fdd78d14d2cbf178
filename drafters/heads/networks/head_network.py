"""How the networks of heads read features and grow trees.

Those of P-EAGLE, Medusa, DFlash and DSpark are files of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ....core.arrays import ROOT
from ....models.heads.dflash_config import RowView
from ....models.heads.feature_head import FeatureHead
from ....models.heads.head_layer import Attend
from ....models.heads.load_head import SharedParts
from ....models.heads.mtp import MtpHead
from ....models.heads.spec_former import SpecFormer
from ...model.tree_job import TreeJob
from .kept_keys import KeptKeys, KeySegment, SegmentAttention, causal_mask


@dataclass(slots=True, eq=False)
class HeadTree:
    """A tree on its way.

    job      its nodes so far, and how their candidates are chosen
    token    the last one of the text, which is its root
    text     keys and values of the text that it stands behind
    root     output of the text's last row, [1, width]
    levels   of the tree, at most
    kept     those, and behind them those of the nodes that were read
    outputs  what is kept of each node: the output [1, width] of its row; of networks that draft all
             levels at once, at the root, logits of all levels; of DSpark, its memory [rank]
    log_confidences  log-probability that what is drafted behind a node is accepted if that is, by
             node, of networks that estimate it
    """

    job: TreeJob
    token: int
    text: KeptKeys
    root: Tensor
    levels: int
    kept: KeptKeys
    outputs: dict[int, Tensor] = field(default_factory=dict)
    log_confidences: dict[int, float] = field(default_factory=dict)


class HeadNetwork(Protocol):
    """A head, with what it shares with its target."""

    @property
    def num_layers(self) -> int:
        """Layers whose keys and values are kept."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def most_levels(self) -> int | None:
        """Levels of a tree that it can draft; None: as many as are wanted."""
        ...

    @property
    def is_parallel(self) -> bool:
        """Whether a level's nodes have one distribution, whatever is drafted before them."""
        ...

    def project(self, features: Tensor) -> Tensor:
        """[rows, width] of features of the target [rows, features' width]: what `read` takes."""
        ...

    def read(
        self, features: Tensor, tokens: Tensor, positions: Tensor, texts: Sequence[KeptKeys],
        counts: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """Outputs of rows, [rows, width]. Their keys and values are kept with their texts.

        features   [rows, width]  of `project`
        tokens     int64 [rows]  behind the features' own
        positions  int64 [rows]  of the features
        counts     rows of each text
        """
        ...

    @property
    def token_ids(self) -> Tensor | None:
        """int64 [n]: of the tokens that `level` has logits of; None: all of the target's."""
        ...

    def level(self, trees: Sequence[HeadTree]) -> Tensor:
        """float32 [nodes, n]: logits after each node of the trees' frontiers; minus infinity where
        the head has no such token."""
        ...


class TextEnds(NamedTuple):
    """Where several texts end.

    tokens     int64 [texts]  the last ones
    positions  int64 [texts]  of these tokens
    outputs    [texts, width]  of the rows before them, the last ones that are read
    """

    tokens: Tensor
    positions: Tensor
    outputs: Tensor


class ParallelNetwork(ABC):
    """A head that drafts all levels of a tree in one pass: all nodes of a level have one
    distribution."""

    num_layers: int
    most_levels: int | None
    is_parallel = True

    def num_behind(self, levels: int) -> int:  # noqa: ARG002 - for heads with such rows
        """Rows of the pass behind each text, which attend to it; 0: the text's output is enough."""
        return 0

    def view(self, layer: int) -> RowView:  # noqa: ARG002 - as of `num_behind`
        """What these rows see in a layer."""
        return RowView(is_causal=True, window=0)

    @abstractmethod
    def logits_of_levels(self, ends: TextEnds, levels: int, attend: Attend) -> Tensor:
        """float32 [texts, levels, vocabulary] of all the target's tokens.

        attend  gets `num_behind(levels)` rows of each text, text by text
        """

    @abstractmethod
    def _all_levels(self, trees: Sequence[HeadTree]) -> Iterable[Tensor]:
        """Of each tree float32 [levels, n] of `token_ids`."""

    def level(self, trees: Sequence[HeadTree]) -> Tensor:
        """All levels are drafted with the first."""
        new = [tree for tree in trees if ROOT not in tree.outputs]
        if new:
            for tree, own in zip(new, self._all_levels(new), strict=True):
                tree.outputs[ROOT] = own
        rows = []
        for tree in trees:
            expansion = tree.job.expansion
            rows += [tree.outputs[ROOT][expansion.depth(node)] for node in expansion.frontier]
        return torch.stack(rows)


def ends_of(trees: Sequence[HeadTree], device: torch.device) -> TextEnds:
    """Of the texts that trees stand behind."""
    return TextEnds(
        torch.tensor([tree.token for tree in trees], device=device),
        torch.tensor([tree.job.text_len - 1 for tree in trees], device=device),
        torch.cat([tree.root for tree in trees]),
    )


class FeatureNetwork:
    """A feature head: drafts go on from the outputs of their parents."""

    most_levels: int | None = None
    is_parallel = False

    def __init__(self, head: FeatureHead | MtpHead, shared: SharedParts) -> None:
        self._head = head
        self._shared = shared
        self.num_layers = head.config.num_layers
        self._dtype = next(head.parameters()).dtype
        self.device = next(head.parameters()).device
        self._own_ids = None
        if isinstance(head, FeatureHead) and head.config.has_token_map:
            own = torch.arange(head.config.draft_vocab_size, device=self.device)
            self._own_ids = head.target_tokens(own)
        self.token_ids = drafted_ids(self._own_ids)

    def project(self, features: Tensor) -> Tensor:
        """What the first layer reads beside the tokens."""
        return self._head.project(features.to(self._dtype))

    def read(
        self, features: Tensor, tokens: Tensor, positions: Tensor, texts: Sequence[KeptKeys],
        counts: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """What predicts and what goes on, side by side."""
        attention = SegmentAttention(causal_segments(texts, counts, features.device))
        return self._kept_outputs(features, self._embeddings(tokens), positions, attention)

    def regress(self, outputs: Tensor) -> Tensor:
        """The part of outputs [rows, width] that the next rows read in place of features."""
        return outputs[:, self._head.config.hidden_size :]

    def level(self, trees: Sequence[HeadTree]) -> Tensor:
        """The root's row is read with the text; nodes are read here."""
        if trees[0].job.expansion.frontier == [ROOT]:
            return self._own_logits(torch.cat([tree.root for tree in trees]))
        segments, before, tokens, positions = [], [], [], []
        first = 0
        for tree in trees:
            expansion, mask = tree.job.expansion, tree.job.mask()
            frontier = expansion.frontier
            rows = slice(first, first + len(frontier))
            seen = None if mask.all() else torch.from_numpy(mask).to(self.device)
            segments.append(KeySegment(rows, tree.kept, seen))
            parents = [expansion.parents[node] for node in frontier]
            before += [tree.root if node == ROOT else tree.outputs[node] for node in parents]
            tokens += [expansion.tokens[node] for node in frontier]
            positions += [tree.job.text_len - 2 + expansion.depth(node) for node in frontier]
            first = rows.stop
        regress = self.regress(torch.cat(before))
        outputs = self._kept_outputs(
            regress,
            self._embeddings(torch.tensor(tokens, device=self.device)),
            torch.tensor(positions, device=self.device),
            SegmentAttention(segments),
        )
        for tree, segment in zip(trees, segments, strict=True):
            rows = outputs[segment.rows].split(1)
            tree.outputs.update(zip(tree.job.expansion.frontier, rows, strict=True))
            tree.job.feed_frontier()
        return self._own_logits(outputs)

    def behind(self, before: Tensor, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Outputs of rows, [rows, width], that go on from the outputs `before` them, [rows, width].

        tokens, positions  int64 [rows]
        """
        return self._outputs(self.regress(before), self._embeddings(tokens), positions, attend)

    def _kept_outputs(
        self, features: Tensor, embeddings: Tensor, positions: Tensor, attention: SegmentAttention
    ) -> Tensor:
        outputs = self._outputs(features, embeddings, positions, attention)
        attention.keep()
        return outputs

    def _outputs(
        self, features: Tensor, embeddings: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        output = self._head(embeddings, features, positions, attend)
        return torch.cat([output.predict, output.regress], dim=-1)

    def _embeddings(self, tokens: Tensor) -> Tensor:
        head = self._head
        if isinstance(head, FeatureHead) and head.config.has_embedding:
            return head.embed_tokens(tokens)
        return self._shared.embeddings(tokens)

    def logits(self, outputs: Tensor) -> Tensor:
        """float32 [rows, vocabulary] of target ids, by the outputs of rows."""
        logits = self._of_own_tokens(outputs)
        if self._own_ids is None:
            return logits
        return on_target(logits, self._own_ids, self._head.config.vocab_size)

    def _own_logits(self, outputs: Tensor) -> Tensor:
        """float32 [rows, n] of `token_ids`, by the outputs of rows."""
        return self.logits(outputs) if self.token_ids is None else self._of_own_tokens(outputs)

    def _of_own_tokens(self, outputs: Tensor) -> Tensor:
        head = self._head
        predict = outputs[:, : head.config.hidden_size]
        if isinstance(head, MtpHead) or not head.config.draft_vocab_size:
            return self._shared.logits(predict)
        return head.lm_head(predict).float()


class SpecFormerNetwork(ParallelNetwork):
    """A SpecFormer: all nodes of a level have one distribution, which depends on the text alone."""

    num_layers = 1
    token_ids: Tensor | None = None

    def __init__(self, head: SpecFormer, shared: SharedParts) -> None:
        self._head = head
        self._shared = shared
        self.most_levels = head.config.draft_length
        self._dtype = next(head.parameters()).dtype
        self.device = next(head.parameters()).device

    def project(self, features: Tensor) -> Tensor:
        """What enters the context's attention."""
        return self._head.project(features.to(self._dtype))

    def read(
        self, features: Tensor, tokens: Tensor, positions: Tensor, texts: Sequence[KeptKeys],
        counts: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """The rows' contexts, of features alone."""
        del tokens
        attention = SegmentAttention(causal_segments(texts, counts, features.device))
        context = self._head.context(features, positions, attention)
        attention.keep()
        return context

    def logits_of_levels(self, ends: TextEnds, levels: int, attend: Attend) -> Tensor:
        """As `ParallelNetwork`."""
        del attend
        return self._logits(ends.outputs, levels)

    def _all_levels(self, trees: Sequence[HeadTree]) -> Tensor:
        levels = max(tree.levels for tree in trees)
        return self._logits(torch.cat([tree.root for tree in trees]), levels)

    def _logits(self, roots: Tensor, levels: int) -> Tensor:
        """float32 [texts, levels, vocabulary] by the outputs of last rows, [texts, width]."""
        drafts = self._head.drafts(roots)[:, :levels]
        logits = self._shared.logits(self._shared.norm(drafts.flatten(0, 1)))
        return logits.unflatten(0, drafts.shape[:2])


def causal_segments(
    texts: Sequence[KeptKeys], counts: Sequence[int], device: torch.device
) -> list[KeySegment]:
    """Rows of several texts, one behind the other, each of which sees all before it in its text."""
    segments, first = [], 0
    for text, count in zip(texts, counts, strict=True):
        rows = slice(first, first + count)
        segments.append(KeySegment(rows, text, causal_mask(count, device)))
        first = rows.stop
    return segments


def drafted_ids(own_ids: Tensor | None) -> Tensor | None:
    """`HeadNetwork.token_ids` of a head with these ids of its own tokens.

    A GPU's kernels choose among all of the target's.
    """
    return own_ids if own_ids is not None and own_ids.device.type == "cpu" else None


def on_target(logits: Tensor, own_ids: Tensor, vocab_size: int) -> Tensor:
    """[rows, vocab_size]: logits of a head's own tokens among all of the target's."""
    wide = logits.new_full((len(logits), vocab_size), -torch.inf)
    return wide.index_copy_(1, own_ids, logits)
