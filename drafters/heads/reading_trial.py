"""Which reading of a head's config is right, by the first drafts of each.

Every reading drafts for every request, and the text judges them beside each other: nothing is run
for it, and no prompt is needed that is like those to come.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.proposals import Proposal
from ...core.tree.proposal_batch import num_right

logger = logging.getLogger(__name__)

# Drafts of each reading that are compared. A wrong layout says hardly a token, a wrong norm some.
NUM_DRAFTS = 64
# Queries after which the best so far is kept, though fewer drafts were in time to be compared.
MOST_QUERIES = 8 * NUM_DRAFTS
# Texts whose drafts wait to be judged; the last stage is not notified of ended requests.
MOST_TEXTS = 1024


@dataclass(slots=True, eq=False)
class _Waiting:
    """Drafts of one place of a text, one of each reading, and the tokens that followed it."""

    length: int
    drafts: Sequence[Proposal]
    tokens: list[int] = field(default_factory=list)


class ReadingTrial:
    """Compares drafts until one reading is known to be best. A request is known by any key."""

    def __init__(self, readings: Sequence[str], num_tokens: int, origin: str, name: str) -> None:
        """`readings`: by what a log calls them, the likeliest first.

        num_tokens    most levels of a draft: so much text judges it
        origin, name  folder and name of the head, for the log
        """
        self._num_tokens = num_tokens
        self._origin = origin
        self._name = name
        self._right = dict.fromkeys(readings, 0)
        self._num_drafts = self._num_queries = 0
        self._waiting: OrderedDict[Hashable, _Waiting] = OrderedDict()
        self.is_over = len(readings) == 1

    @property
    def acceptance(self) -> dict[str, float]:
        """By reading, tokens of a draft that the text took, on average; the best one first."""
        shares = {name: right / max(1, self._num_drafts) for name, right in self._right.items()}
        return dict(sorted(shares.items(), key=lambda one: -one[1]))

    @property
    def best(self) -> str:
        """The best reading so far. Which one that is follows the text alone, so drafts of it that
        are declared draws stay such."""
        return next(iter(self.acceptance))

    def asked(self, num_queries: int) -> None:
        """So many more drafts were wanted."""
        self._num_queries += num_queries
        if self._num_queries >= MOST_QUERIES:
            self._end()

    def drafted(self, key: Hashable, length: int, drafts: Sequence[Proposal]) -> None:
        """Each reading drafted behind the first `length` tokens of a text. Compared where all of
        them said something, and no other drafts for the text are being judged."""
        is_new = not self.is_over and key not in self._waiting
        if is_new and all(len(draft.tokens) for draft in drafts):
            self._waiting[key] = _Waiting(length, drafts)
            if len(self._waiting) > MOST_TEXTS:
                self._waiting.popitem(last=False)

    def followed(self, key: Hashable, length: int, tokens: Sequence[int]) -> None:
        """Behind `length` tokens a text went on so."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return
        if length != waiting.length + len(waiting.tokens):
            # Some rows are missing, or it was computed again.
            del self._waiting[key]
            return
        waiting.tokens += tokens
        if len(waiting.tokens) >= self._num_tokens:
            self._judge(self._waiting.pop(key))

    def forget(self, key: Hashable) -> None:
        """The request has ended; an unknown one is ignored."""
        self._waiting.pop(key, None)

    def forget_all(self) -> None:
        """All requests have ended."""
        self._waiting.clear()

    def _judge(self, waiting: _Waiting) -> None:
        tokens = np.array(waiting.tokens, dtype=np.int32)
        for name, draft in zip(self._right, waiting.drafts, strict=True):
            self._right[name] += num_right(draft, tokens)
        self._num_drafts += 1
        if self._num_drafts == NUM_DRAFTS:
            self._end()

    def _end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._waiting.clear()
        acceptance = self.acceptance
        [best, *others] = acceptance
        logger.warning(
            "drafter=%s event=probed drafts=%d kept=%s tokens=%.2f %s: config.json in %s does not "
            "tell, and these drafts are right most often; say so there",
            self._name, self._num_drafts, best, acceptance[best],
            " ".join(f"not={one} tokens={acceptance[one]:.2f}" for one in others), self._origin,
        )  # fmt: skip
