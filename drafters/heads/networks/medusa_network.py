"""How Medusa's heads draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....models.heads.load_head import SharedParts
from ....models.heads.medusa import Medusa
from .head_network import HeadTree, level_of_all
from .kept_keys import KeptKeys


class MedusaNetwork:
    """All nodes of a level have one distribution, which depends on one state of the target.

    The state is that of the last token but one, whose next token, the root, is committed: so the
    root's children are what head 0 says, theirs what head 1 says.
    """

    # The state has the whole text in it; nothing is kept.
    num_layers = 0
    says_all_levels = True

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
        """float32 [trees, levels, vocabulary]."""
        drafts = self._heads.drafts(torch.cat([tree.root for tree in trees]))
        logits = [
            self._heads.logits(index, own, self._shared.logits).float()
            for index, own in enumerate(drafts.unbind(-2))
        ]
        return torch.stack(logits, dim=1)
