"""Whether heads belong to the model that they draft for, by their first drafts.

A head that was trained for another model, or for another state of it, may fit by its sizes, and its
drafts are never right. Tokens stay the target's own; what it costs is time, and states that are
sent for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ...core.arrays import Int32
from ...core.proposals import Proposal, Query, StepCommit
from ...core.tree.proposal_batch import num_right
from ..config import HEAD, EngineConfig
from .options import head_folder

logger = logging.getLogger(__name__)

# Drafts of a head that are judged at most, and the share whose first token is right, at least, if
# it belongs to the model. One that was trained has 0.2 and more. Of heads with 0.1, one in 270 is
# left out; of those with 0.02, one in 110 is kept; the budget would buy nothing of either.
NUM_DRAFTS = 200
LEAST_SHARE = 0.05
# So many right drafts beyond that share are enough at any time, as in Wald's sequential test: a
# head with 0.2 is known after 22 drafts.
ENOUGH_RIGHT = 3
# Queries after which heads that say nothing are asked like other drafters.
MOST_QUERIES = 4 * NUM_DRAFTS


class HeadWatch:
    """Counts how many of the first drafts of each head begin as the text goes on.

    They are compared with the text whether they were verified or not. Until the verdict, heads are
    asked for a few requests whatever they bring: the policy would stop asking a useless head, and
    no warning would name it.
    """

    __slots__ = ("_counts", "_given", "_num_queries", "_origins", "_watched")

    def __init__(self, names: Sequence[str], origins: Mapping[str, str]) -> None:
        """`names` of the heads; `origins`: what a warning about each says."""
        self._watched = set(names)
        self._origins = origins
        # Drafts that were judged, and right ones.
        self._counts = {name: [0, 0] for name in names}
        # By request: its length and the drafts for it, until the next tokens are known.
        self._given: dict[str, tuple[int, list[Proposal]]] = {}
        self._num_queries = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to find out."""
        return not self._watched

    @property
    def new(self) -> frozenset[str]:
        """Heads that are to be asked whatever they bring."""
        return frozenset(self._watched if self._num_queries < MOST_QUERIES else ())

    def given(self, query: Query, proposals: Sequence[Proposal]) -> None:
        """Note proposals that were given out; they replace those before them for the request.

        What stands behind a path is not judged: the text may go another way.
        """
        self._num_queries += 1
        drafts = [one for one in proposals if one.source in self._watched]
        if drafts and not query.assumed:
            self._given[query.request_id] = query.committed_len, drafts

    def forget(self, request_id: str) -> None:
        """The request has ended; an unknown id is ignored."""
        self._given.pop(request_id, None)

    def committed(self, commits: Sequence[StepCommit]) -> list[str]:
        """Judge drafts by the tokens that followed; names of heads that do not belong here."""
        for commit in commits:
            length, drafts = self._given.pop(commit.request_id, (0, []))
            if commit.base_len == length:
                for draft in drafts:
                    self._judge(draft, commit.tokens)
        return [name for name in tuple(self._watched) if self._is_strange(name)]

    def _judge(self, draft: Proposal, tokens: Int32) -> None:
        counts = self._counts[draft.source]
        counts[0] += 1
        counts[1] += num_right(draft, tokens[:1])

    def _is_strange(self, name: str) -> bool:
        num_drafts, num_first = self._counts[name]
        enough = ENOUGH_RIGHT + LEAST_SHARE * num_drafts
        belongs = num_first >= min(enough, LEAST_SHARE * NUM_DRAFTS)
        if num_drafts < NUM_DRAFTS and not belongs:
            return False
        self._watched.discard(name)
        if belongs:
            return False
        logger.warning(
            "drafter=%s event=left_out drafts=%d right=%d %s",
            name, num_drafts, num_first, self._origins.get(name, ""),
        )  # fmt: skip
        return True


def head_origins(config: EngineConfig) -> dict[str, str]:
    """What is said of heads that do not belong here, by their names: folder, model, what to do."""
    heads = [(head.source, head_folder(head)) for head in config.drafters if head.kind == HEAD]
    return {
        name: f"almost nothing that it drafts is right: it is not asked until the next start. "
        f"Check that the head in {folder} was trained for {config.model}, and for these weights of "
        f"it; `draftline doctor --drafter {folder} --model {config.model}` compares their sizes"
        for name, folder in heads
    }
