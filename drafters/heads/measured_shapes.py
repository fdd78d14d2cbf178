"""What Sequoia's trees of a head follow: which of its drafts were right, and what rounds take."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

from ...core.proposals import Proposal
from ..model.expansion import StaticExpansion
from ..model.options import FULL
from ..model.sequoia import SequoiaShapes
from ..model.stopping.draft_costs import DraftCosts
from .options import HeadOptions

# Drafts that wait for the text after them; the last stage is not notified of ended requests.
MOST_DRAFTS = 4096


class MeasuredShapes:
    """Shapes of one head's trees, by its own drafts and times (`drafters/model/sequoia.py`).

    A request is known by any key. What is between the drafts of one request is a verification;
    anything else may be idleness.
    """

    def __init__(
        self,
        options: HeadOptions,
        *,
        is_one_pass: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_one_pass`: all levels together take one pass."""
        self._is_one_pass = is_one_pass
        self._clock = clock
        self._costs = DraftCosts()
        self._shapes = SequoiaShapes(
            self._costs,
            is_full=options.tree_size == FULL,
            is_one_pass=is_one_pass,
            acceptance=options.acceptance,
        )
        self._drafts: OrderedDict[Hashable, tuple[int, Proposal]] = OrderedDict()
        self._drafted: frozenset[Hashable] = frozenset()
        self._finished_at = self._level_at = 0.0
        # Of each request in the last round, on average.
        self._num_nodes = 0.0

    def expansion(self, depth: int, max_nodes: int) -> StaticExpansion:
        """The tree that brings most tokens a second, of at most so many levels and nodes."""
        return StaticExpansion(self._shapes.shape(max_nodes, depth))

    def started(self, keys: Collection[Hashable]) -> None:
        """A round of drafts for these requests begins."""
        if not self._drafted.isdisjoint(keys):
            self._shapes.note_verify(self._num_nodes, self._clock() - self._finished_at)

    def grows(self) -> None:
        """The first level is begun."""
        self._level_at = self._clock()

    def level_done(self, *, is_last: bool) -> None:
        """Another level of all trees is there."""
        if is_last or not self._is_one_pass:
            now = self._clock()
            self._costs.note_draw(now - self._level_at)
            self._level_at = now

    def finished(self, drafts: Mapping[Hashable, tuple[int, Proposal]]) -> None:
        """The round's drafts, by request, with the tokens of the texts that they stand behind."""
        for key, draft in drafts.items():
            self._drafts.pop(key, None)
            self._drafts[key] = draft
        while len(self._drafts) > MOST_DRAFTS:
            self._drafts.popitem(last=False)
        sizes = [len(proposal.tokens) for _, proposal in drafts.values()]
        self._num_nodes = sum(sizes) / max(len(sizes), 1)
        self._drafted = frozenset(drafts)
        self._finished_at = self._clock()

    def followed(self, key: Hashable, length: int, tokens: Sequence[int]) -> None:
        """Behind `length` tokens a text went on so: judges what was drafted there."""
        before, proposal = self._drafts.pop(key, (0, None))
        if proposal is not None and before == length:
            self._shapes.judge(proposal.tokens, proposal.parents, tokens)

    def forget_all(self) -> None:
        """All requests have ended."""
        self._drafts.clear()
        self._drafted = frozenset()

    def forget(self, key: Hashable) -> None:
        """The request has ended; an unknown one is ignored."""
        self._drafts.pop(key, None)
