"""A head whose config leaves open how it is read: its first drafts tell.

Every reading drafts for every request, and the text judges them beside each other: nothing is run
for it, and no prompt is needed that is like those to come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...core.interfaces import Drafter, FeatureDrafter
from ...core.proposals import (
    Commit,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    Proposal,
    Query,
)
from ...core.tree.proposal_batch import num_right

logger = logging.getLogger(__name__)

# Drafts of each reading that are compared. A wrong layout says hardly a token, a wrong norm some.
NUM_DRAFTS = 64
# Queries after which the best so far is kept, though fewer drafts were in time to be compared.
MOST_QUERIES = 8 * NUM_DRAFTS


class HeadReader(Drafter, FeatureDrafter, Protocol):
    """A head by one reading of its config."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """Drafts of one place of a text, one of each reading, and the tokens that followed it."""

    drafts: Sequence[Proposal]
    tokens: list[int] = field(default_factory=list)


class ProbingDrafter:
    """Asks a drafter of each reading, until the one whose drafts are best is known and kept.

    Until then the best so far is heard. Which one that is follows the text alone, so drafts that
    are declared draws stay such.
    """

    def __init__(
        self, readings: Mapping[str, HeadReader], num_tokens: int, origin: str, name: str
    ) -> None:
        """`readings`: by what a log calls them, the likeliest first.

        num_tokens  most levels of a draft: so much text judges it
        origin      folder of the head, for the log
        """
        self._readings = dict(readings)
        self._num_tokens = num_tokens
        self._origin = origin
        self._name = name
        self._right = dict.fromkeys(readings, 0)
        self._num_drafts = self._num_queries = 0
        self._waiting: dict[str, _Waiting] = {}

    @property
    def name(self) -> str:
        """The `source` of the proposals."""
        return self._name

    @property
    def feature_layers(self) -> FeatureLayers:
        """Layers whose outputs it reads, the same for all readings."""
        return self._best.feature_layers

    @property
    def memory_bytes(self) -> int:
        """About the bytes of texts, keys, values and features that wait."""
        return sum(one.memory_bytes for one in list(self._readings.values()))

    @property
    def is_over(self) -> bool:
        """Whether one reading is left."""
        return len(self._readings) == 1

    @property
    def acceptance(self) -> dict[str, float]:
        """By reading, tokens of a draft that the text took, on average; the best one first.

        Also of readings that were let go.
        """
        shares = {name: right / max(1, self._num_drafts) for name, right in self._right.items()}
        return dict(sorted(shares.items(), key=lambda one: -one[1]))

    def open(self, request: DraftRequest) -> None:
        """Begin a request with all readings. Raises `DrafterError` without a token."""
        self._waiting.pop(request.request_id, None)
        for one in self._readings.values():
            one.open(request)

    def close(self, request_id: str) -> None:
        """Forget a request; an unknown id is ignored."""
        self._waiting.pop(request_id, None)
        for one in self._readings.values():
            one.close(request_id)

    def observe_features(self, rows: Sequence[FeatureRows]) -> None:
        """Keep features for the next `propose`; those of unknown requests are ignored."""
        for one in self._readings.values():
            one.observe_features(rows)

    def observe(self, commits: Sequence[Commit]) -> None:
        """Follow the committed tokens. Raises `DrafterError` for a commit that does not fit."""
        for one in self._readings.values():
            one.observe(commits)
        for commit in commits:
            waiting = self._waiting.get(commit.request_id)
            if waiting is not None:
                waiting.tokens += commit.tokens.tolist()
                if len(waiting.tokens) >= self._num_tokens:
                    self._judge(self._waiting.pop(commit.request_id))

    def propose(
        self, queries: Sequence[Query], deadline: float | None = None
    ) -> Sequence[Proposal]:
        """What the best reading so far proposes; smaller where the deadline passes."""
        if self.is_over:
            return self._best.propose(queries, deadline)
        given = {name: one.propose(queries, deadline) for name, one in self._readings.items()}
        proposals = given[next(iter(self.acceptance))]
        # A draft that was cut by the deadline tells nothing.
        if deadline is None or time.monotonic() < deadline:
            for query, *drafts in zip(queries, *given.values(), strict=True):
                if all(len(draft.tokens) for draft in drafts):
                    self._waiting.setdefault(query.request_id, _Waiting(drafts))
        self._num_queries += len(queries)
        if self._num_queries >= MOST_QUERIES:
            self._keep_best()
        return proposals

    @property
    def _best(self) -> HeadReader:
        return self._readings[next(iter(self.acceptance))]

    def _judge(self, waiting: _Waiting) -> None:
        tokens = np.array(waiting.tokens, dtype=np.int32)
        for name, draft in zip(self._readings, waiting.drafts, strict=True):
            self._right[name] += num_right(draft, tokens)
        self._num_drafts += 1
        if self._num_drafts == NUM_DRAFTS:
            self._keep_best()

    def _keep_best(self) -> None:
        acceptance = self.acceptance
        [best, *others] = acceptance
        logger.warning(
            "drafter=%s event=probed drafts=%d kept=%s tokens=%.2f %s: config.json in %s does not "
            "tell, and these drafts are right most often; say so there",
            self._name, self._num_drafts, best, acceptance[best],
            " ".join(f"not={one} tokens={acceptance[one]:.2f}" for one in others), self._origin,
        )  # fmt: skip
        self._readings = {best: self._readings[best]}
        self._waiting.clear()
