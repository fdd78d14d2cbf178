"""What drafting takes and brings one drafter, and how deep its drafts become.

Another level is drafted where it saves more than it takes: docs/drafters.md, "Levels that pay".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import Protocol

from ...core.proposals import Query, level_tokens

# Weight of the newest measurement in a running mean.
WEIGHT = 0.1
# A pass that feeds more tokens of one request is no draw.
MOST_READ = 16
# Share of judged tokens that is taken for accepted before any was judged.
FIRST_ACCEPTED = 0.5


class GrowingDraft(Protocol):
    """A draft on its way."""

    @property
    def reach(self) -> float:
        """How probable it is that the text goes through what the next level is drafted behind.

        Infinite: the level is drafted whatever it is worth.
        """
        ...


class PayingDepth:
    """Says after each level of a batch of drafts whether another one pays.

    Of the texts that come as far as a level, as many are expected to go through the next one as
    went on from the level before (cf. Brown et al., Dynamic Depth Decoding, arXiv 2409.00142).
    """

    __slots__ = ("_before", "_level_tokens")

    def __init__(self, level_tokens: float) -> None:
        """`level_tokens` must be expected of a level (`core.proposals.level_tokens`)."""
        self._level_tokens = level_tokens
        # Texts that came as far as the last level; at first all of them.
        self._before = 0.0

    def goes_on(self, drafts: Sequence[GrowingDraft]) -> bool:
        """Whether another level is drafted for these."""
        reach = sum(draft.reach for draft in drafts)
        if not drafts or reach == inf:
            return bool(drafts)
        before, self._before = self._before or len(drafts), reach
        return reach * min(reach / before, 1.0) >= self._level_tokens


class DraftCosts:
    """Running means over a drafter's requests.

    draw_s    seconds of a draw
    token_s   that an accepted token saves, as the engine says; 0: it does not
    is_told   whether the engine says what a verification takes: then it weighs drafts itself
    verify_s  of a verification
    accepted  share of judged tokens that was accepted
    """

    __slots__ = ("_is_known", "accepted", "draw_s", "is_told", "token_s", "verify_s")

    def __init__(self) -> None:
        # Until both are known every length is worth trying.
        self.draw_s = self.token_s = 0.0
        self.verify_s = 1.0
        self.accepted = FIRST_ACCEPTED
        self._is_known = self.is_told = False

    def note_draw(self, seconds: float, num_read: int = 1) -> None:
        """Learn the seconds of one more token for all requests of a batch.

        num_read  most tokens that one of them fed: who reads a text takes longer
        """
        if num_read <= MOST_READ:
            self.draw_s += WEIGHT * (seconds - self.draw_s)

    def note_verify(self, seconds: float) -> None:
        """Learn the seconds from the end of one draft to the beginning of the next."""
        weight = WEIGHT if self._is_known else 1.0
        self.verify_s += weight * (seconds - self.verify_s)
        self._is_known = True

    def note_engine_costs(self, queries: Sequence[Query]) -> None:
        """Take what the engine has measured: who is asked now and then sees no verification."""
        self.token_s = max((query.token_s for query in queries), default=0.0)
        if step_s := max((query.step_s for query in queries), default=0.0):
            self.verify_s = step_s
            self._is_known = self.is_told = True

    def depth(self) -> PayingDepth:
        """How deep the next drafts become."""
        return PayingDepth(level_tokens(self.draw_s, self.token_s))

    def note_accepted(self, share: float) -> None:
        """Learn the share of a draft's judged tokens that was accepted."""
        self.accepted += WEIGHT * (share - self.accepted)


class DraftRounds:
    """When a drafter drafted last, and for which requests: what is between two drafts of one
    request is a verification, if no more was committed than that may have brought. Anything else
    may be idleness.
    """

    __slots__ = ("_drafted", "_finished_at")

    def __init__(self) -> None:
        self._finished_at = 0.0
        self._drafted: frozenset[str] = frozenset()

    def verify_s(self, stepped: Collection[str], now: float) -> float | None:
        """Seconds of the verification that is over; None if there was none.

        stepped  requests that are asked for, whose text one step went on by since
        """
        return None if self._drafted.isdisjoint(stepped) else now - self._finished_at

    def finished(self, request_ids: Collection[str], now: float) -> None:
        """Note that drafts of these requests are done; of none, if they are behind assumed tokens:
        those before them know how long a verification takes."""
        self._finished_at = now
        self._drafted = frozenset(request_ids)
