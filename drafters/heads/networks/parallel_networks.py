"""How P-EAGLE and Medusa draft: all levels in one pass.

P-EAGLE reads masks behind the text, one for each draft but the first. Medusa's heads read one state
of the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ....models.heads.head_layer import Attend
from ....models.heads.load_head import SharedParts
from ....models.heads.medusa import Medusa
from ....models.heads.p_eagle import PEagle
from .head_network import FeatureNetwork, HeadTree, ParallelNetwork, TextEnds, ends_of
from .kept_keys import KeptKeys, KeySegment, SegmentAttention, causal_mask


class PEagleNetwork(ParallelNetwork, FeatureNetwork):
    """A P-EAGLE drafter: all nodes of a level have one distribution, given by the text alone.

    Rows of the text are read as EAGLE-3 reads them, and kept; masks are thrown away with the tree.
    """

    def __init__(self, head: PEagle, shared: SharedParts) -> None:
        super().__init__(head, shared)
        self.most_levels = head.config.draft_length or None
        with torch.inference_mode():
            # Both are the same for every mask.
            self._features = head.masks(1)
            mask = torch.tensor([head.config.mask_token], device=self.device)
            self._embedding = self._embeddings(mask)

    def num_behind(self, levels: int) -> int:
        """A mask for each level but the first, which the text's last row drafts."""
        return levels - 1

    def logits_of_levels(self, ends: TextEnds, levels: int, attend: Attend) -> Tensor:
        """As `ParallelNetwork`."""
        outputs = self._outputs_of_levels(ends, levels, attend)
        return self.logits(outputs.flatten(0, 1)).unflatten(0, outputs.shape[:2])

    def _all_levels(self, trees: Sequence[HeadTree]) -> Iterable[Tensor]:
        levels = max(tree.levels for tree in trees)
        mask = causal_mask(levels - 1, self.device)
        starts = range(0, len(trees) * (levels - 1), levels - 1) if levels > 1 else ()
        segments = [
            KeySegment(slice(start, start + levels - 1), tree.kept, mask)
            for start, tree in zip(starts, trees, strict=False)
        ]
        ends = ends_of(trees, self.device)
        outputs = self._outputs_of_levels(ends, levels, SegmentAttention(segments))
        return self._own_logits(outputs.flatten(0, 1)).split(levels)

    def _outputs_of_levels(self, ends: TextEnds, levels: int, attend: Attend) -> Tensor:
        """[texts, levels, width]: outputs of the last rows and of the masks behind them."""
        count = levels - 1
        if not count:
            return ends.outputs[:, None]
        # The first mask stands where the last token does: rows are one behind their features.
        places = ends.positions[:, None] + torch.arange(count, device=self.device)
        masks = self._outputs(
            self._features.expand(places.numel(), -1),
            self._embedding.expand(places.numel(), -1),
            places.flatten(),
            attend,
        )
        return torch.cat([ends.outputs[:, None], masks.unflatten(0, places.shape)], dim=1)


class MedusaNetwork(ParallelNetwork):
    """All nodes of a level have one distribution, which depends on one state of the target.

    The state is that of the last token but one, whose next token, the root, is committed: so the
    root's children are drafted by head 0, theirs by head 1.
    """

    # The state has the whole text in it; nothing is kept.
    num_layers = 0
    token_ids: Tensor | None = None

    def __init__(self, heads: Medusa, shared: SharedParts) -> None:
        self._heads = heads
        self._shared = shared
        self.most_levels = heads.config.draft_length
        first = next(heads.parameters())
        self.device, self._dtype = first.device, first.dtype

    def project(self, features: Tensor) -> Tensor:
        """The states as they are."""
        return features.to(self._dtype)

    def read(
        self, features: Tensor, tokens: Tensor, positions: Tensor, texts: Sequence[KeptKeys],
        counts: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """What the heads read: the states."""
        del tokens, positions, texts, counts
        return features

    def logits_of_levels(self, ends: TextEnds, levels: int, attend: Attend) -> Tensor:
        """As `ParallelNetwork`."""
        del attend
        return self._logits(ends.outputs, levels)

    def _all_levels(self, trees: Sequence[HeadTree]) -> Tensor:
        levels = max(tree.levels for tree in trees)
        return self._logits(torch.cat([tree.root for tree in trees]), levels)

    def _logits(self, states: Tensor, levels: int) -> Tensor:
        """float32 [texts, levels, vocabulary] of states [texts, width]."""
        drafts = self._heads.drafts(states)[:, :levels]
        logits = [
            self._heads.logits(index, own, self._shared.logits).float()
            for index, own in enumerate(drafts.unbind(-2))
        ]
        return torch.stack(logits, dim=1)
