"""What two vocabularies share: tokens that write the same bytes, one to one.

The intersection of token-level drafting (TLI: Timor et al., arXiv 2502.05202, Algorithm 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....core.arrays import Int64
from .surfaces import Vocabulary

NO_ID = -1


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyMap:
    """An injective map from a drafter's ids to the target's.

    to_target  int64 [drafter's ids]  -1 where the target has no such token
    to_draft   int64 [target's ids]   -1 where the drafter has none
    """

    to_target: Int64
    to_draft: Int64

    @property
    def draft_ids(self) -> Int64:
        """Shared tokens as the drafter's ids, in the order of `target_ids`."""
        return self.to_draft[self.target_ids]

    @property
    def target_ids(self) -> Int64:
        """Shared tokens as the target's ids, ascending."""
        return np.flatnonzero(self.to_draft != NO_ID)

    @property
    def num_shared(self) -> int:
        """Tokens that both have."""
        return int((self.to_draft != NO_ID).sum())

    @property
    def is_identity(self) -> bool:
        """Whether every token of the target has the same id in the drafter, and none is more."""
        same = len(self.to_target) == len(self.to_draft)
        return same and bool((self.to_draft == np.arange(len(self.to_draft))).all())

    def describe(self) -> str:
        """One line for people: how many tokens are shared, and what share of either side."""
        target, draft = len(self.to_draft), len(self.to_target)
        return (
            f"{self.num_shared} tokens are in both: {self.num_shared / max(target, 1):.0%} of the "
            f"target's {target}, {self.num_shared / max(draft, 1):.0%} of the drafter's {draft}"
        )


def map_vocabularies(
    draft: Vocabulary, target: Vocabulary, draft_size: int, target_size: int
) -> VocabularyMap:
    """Pair the tokens that write the same bytes, and the tokens that end or begin a text.

    Of several tokens of equal bytes the first is paired, pieces before those that only spell bytes.
    Special tokens are paired by what they do, never by their names. Sizes are those of the models.
    """
    to_target = np.full(draft_size, NO_ID, dtype=np.int64)
    to_draft = np.full(target_size, NO_ID, dtype=np.int64)

    def pair(own: int | None, other: int | None) -> None:
        if own is None or other is None or own >= draft_size or other >= target_size:
            return
        if to_target[own] == NO_ID and to_draft[other] == NO_ID:
            to_target[own], to_draft[other] = other, own

    first: dict[bytes, int] = {}
    for token, surface in target.pieces():
        first.setdefault(surface, token)
    for token, surface in draft.pieces():
        pair(token, first.get(surface))
    pair(draft.end, target.end)
    pair(draft.begin, target.begin)
    return VocabularyMap(to_target, to_draft)
