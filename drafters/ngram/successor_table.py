"""Token Recycling's adjacency matrix: which tokens the target last found probable after a token."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...core.arrays import ROOT
from ...core.errors import DrafterError
from ...core.proposals import TopNextTokens
from .tree_template import TemplateNode

UNKNOWN = -1


class SuccessorTable:
    """token -> its `num_top_next_tokens` most probable next tokens, where it was seen last.

    A matrix that grows with the ids it hears of. Ids from `max_vocab` on are refused.
    """

    __slots__ = ("_ids", "_max_vocab")

    def __init__(self, num_top_next_tokens: int, max_vocab: int) -> None:
        self._max_vocab = max_vocab
        # The last row is never learned. It is the one that UNKNOWN indexes, so what comes after an
        # unknown token is unknown without a question.
        self._ids = np.full((1, num_top_next_tokens), UNKNOWN, dtype=np.int32)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the matrix."""
        return self._ids.nbytes

    def learn(self, top_next_tokens: TopNextTokens) -> None:
        """Replace what is known of these tokens; of equal ones the last counts.

        Raises `DrafterError` if the rows have another width, or an id is out of range.
        """
        tokens, ids = top_next_tokens.tokens, top_next_tokens.ids
        if ids.shape != (len(tokens), self._ids.shape[1]):
            raise DrafterError(
                f"{ids.shape[1]} top next tokens a token came, {self._ids.shape[1]} were wanted"
            )
        highest = int(max(tokens.max(initial=UNKNOWN), ids.max(initial=UNKNOWN)))
        if highest >= self._max_vocab:
            raise DrafterError(f"token {highest} is not below max_vocab, {self._max_vocab}")
        self._reserve(highest + 1)
        self._ids[tokens] = ids

    def expand(self, root: int, template: Iterable[TemplateNode]) -> tuple[list[int], list[int]]:
        """Tokens and parents, as in `Proposal`, of the template's nodes that are known."""
        tokens: list[int] = []
        parents: list[int] = []
        # Of the root and of each node of the template: its token, and its place in `tokens`.
        drafted = [root if root < len(self._ids) - 1 else UNKNOWN]
        places = [ROOT]
        rows: dict[int, list[int]] = {}
        for parent, rank in template:
            above = drafted[parent]
            row = rows.get(above)
            if row is None:
                row = rows[above] = self._ids[above].tolist()
            drafted.append(row[rank])
            places.append(len(tokens))
            if row[rank] != UNKNOWN:
                tokens.append(row[rank])
                parents.append(places[parent])
        return tokens, parents

    def _reserve(self, num_tokens: int) -> None:
        num_known = len(self._ids) - 1
        if num_tokens <= num_known:
            return
        # Doubling: ids come in any order, and each growth copies all.
        size = min(max(num_tokens, 2 * num_known), self._max_vocab)
        grown = np.full((size + 1, self._ids.shape[1]), UNKNOWN, dtype=np.int32)
        grown[:num_known] = self._ids[:num_known]
        self._ids = grown
