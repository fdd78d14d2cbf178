"""How often the target says what the drafter finds likely, learned from what came true.

A drafter's own probabilities say how sure it is of a token, not how often the target agrees. See
docs/algorithms/drafters.md, "Drafting ahead".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....core.arrays import ROOT
from ....core.proposals import AheadQuery, Commit
from ....core.tree.acceptance_table import AcceptanceTable
from .outcomes import Candidates

# The table's only source, and the depth of all that it judges.
SOURCE, DEPTH = "ahead", 1
# Candidates after a node that are learned from; what is known of the last ones is of all further.
JUDGED = 8


@dataclass(frozen=True, slots=True)
class _Asked:
    """A tree in flight and, by the drafter itself, what may come after its root and each node."""

    tokens: Sequence[int]
    parents: Sequence[int]
    candidates: Sequence[Candidates]


class Agreement:
    """Corrects the probabilities of candidates by their rank and by what became of others like
    them, over all requests of a drafter.
    """

    def __init__(self) -> None:
        self._table = AcceptanceTable()
        self._asked: dict[str, _Asked] = {}
        # Compiles the loops, or reads them from disk, before the engine waits for them.
        self.corrected(Candidates(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)))

    def corrected(self, candidates: Candidates) -> Candidates:
        """The same tokens, by what is known of them by now."""
        found = self._table.estimates(SOURCE, candidates.log_probs, DEPTH)
        return candidates._replace(log_probs=np.log(found).astype(np.float32))

    def ask(self, query: AheadQuery, candidates: Sequence[Candidates]) -> None:
        """Keep what the drafter says of a tree until the target says more."""
        self._asked[query.request_id] = _Asked(
            query.tokens.tolist(), query.parents.tolist(), candidates
        )

    def said(self, commit: Commit) -> None:
        """Learn from what followed on the path of the tree that was asked about."""
        asked = self._asked.pop(commit.request_id, None)
        if asked is None:
            return
        node: int | None = ROOT
        for token in commit.tokens.tolist():
            if node is None:
                return
            tokens, log_probs = asked.candidates[node + 1]
            pairs = zip(tokens[:JUDGED].tolist(), log_probs.tolist(), strict=False)
            for rank, (one, log_prob) in enumerate(pairs):
                self._table.record(SOURCE, log_prob, DEPTH, rank, accepted=one == token)
            node = _child(asked, node, token)

    def forget(self, request_id: str) -> None:
        """A request has ended; an unknown id is ignored."""
        self._asked.pop(request_id, None)


def _child(asked: _Asked, node: int, token: int) -> int | None:
    pairs = enumerate(zip(asked.tokens, asked.parents, strict=True))
    return next((one for one, pair in pairs if pair == (token, node)), None)
