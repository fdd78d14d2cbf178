"""How P-EAGLE and Medusa draft: all levels in one pass.

P-EAGLE reads masks behind the text, one for each draft but the first. Medusa's heads read one state
of the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ....models.heads.load_head import SharedParts
from ....models.heads.medusa import Medusa
from ....models.heads.p_eagle import PEagle
from .head_network import FeatureNetwork, HeadTree, level_of_all
from .kept_keys import KeptKeys, KeySegment, SegmentAttention, causal_mask


class PEagleNetwork(FeatureNetwork):
    """A P-EAGLE drafter: all nodes of a level have one distribution, given by the text alone.

    Rows of the text are read as EAGLE-3 reads them, and kept; masks are thrown away with the tree.
    """

    says_all_levels = True

    def __init__(self, head: PEagle, shared: SharedParts) -> None:
        super().__init__(head, shared)
        self.most_levels = head.config.draft_length or None
        with torch.inference_mode():
            # Both are the same for every mask.
            self._features = head.masks(1)
            mask = torch.tensor([head.config.mask_token], device=self.device)
            self._embedding = self._embeddings(mask)

    def level(self, trees: Sequence[HeadTree]) -> Tensor:
        """All levels are drafted with the first."""
        return level_of_all(trees, self._all_levels)

    def _all_levels(self, trees: Sequence[HeadTree]) -> Iterable[Tensor]:
        """The text's last row says the first draft, masks say the others."""
        counts = [tree.levels - 1 for tree in trees]
        masks = self._masks(trees, counts).split(counts)
        rows = [torch.cat(pair) for pair in zip((t.root for t in trees), masks, strict=True)]
        return self._own_logits(torch.cat(rows)).split([tree.levels for tree in trees])

    def _masks(self, trees: Sequence[HeadTree], counts: Sequence[int]) -> Tensor:
        """[masks, width]: what so many masks behind each text say."""
        segments, places = [], []
        ends = list(accumulate(counts))
        for tree, count, end in zip(trees, counts, ends, strict=True):
            if count:
                mask = causal_mask(count, self.device)
                segments.append(KeySegment(slice(end - count, end), tree.kept, mask))
            # The text's last row is that of its last token but one.
            first = tree.job.text_len - 1
            places.append(torch.arange(first, first + count, device=self.device))
        return self._said(
            self._features.expand(ends[-1], -1),
            self._embedding.expand(ends[-1], -1),
            torch.cat(places),
            SegmentAttention(segments),
        )


class MedusaNetwork:
    """All nodes of a level have one distribution, which depends on one state of the target.

    The state is that of the last token but one, whose next token, the root, is committed: so the
    root's children are what head 0 says, theirs what head 1 says.
    """

    # The state has the whole text in it; nothing is kept.
    num_layers = 0
    says_all_levels = True
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

    def level(self, trees: Sequence[HeadTree]) -> Tensor:
        """All levels come with the first."""
        return level_of_all(trees, self._all_levels)

    def _all_levels(self, trees: Sequence[HeadTree]) -> Tensor:
        return self.logits_of_levels(torch.cat([tree.root for tree in trees]))

    def logits_of_levels(self, roots: Tensor) -> Tensor:
        """float32 [texts, levels, vocabulary] of states [texts, width]."""
        drafts = self._heads.drafts(roots)
        logits = [
            self._heads.logits(index, own, self._shared.logits).float()
            for index, own in enumerate(drafts.unbind(-2))
        ]
        return torch.stack(logits, dim=1)
