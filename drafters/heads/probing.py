"""A head drafter whose config leaves open how it is read: its first drafts tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ...core.interfaces import Drafter, FeatureDrafter
from ...core.proposals import (
    Commit,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    Proposal,
    Query,
)
from .reading_trial import ReadingTrial


class HeadReader(Drafter, FeatureDrafter, Protocol):
    """A head by one reading of its config."""

    clock: Callable[[], float]

    @property
    def num_passes(self) -> int: ...  # noqa: D102 - see `HeadDrafter`


class ProbingDrafter:
    """Asks a drafter of each reading, until one is kept (`ReadingTrial`). Until then the best so
    far drafts."""

    def __init__(self, readings: Mapping[str, HeadReader], trial: ReadingTrial) -> None:
        """`readings`: those of the trial, all of one name."""
        self._readings = dict(readings)
        self._trial = trial
        # Of readings that were let go.
        self._passes_before = 0

    @property
    def name(self) -> str:
        """The `source` of the proposals."""
        return self._best.name

    @property
    def clock(self) -> Callable[[], float]:
        """Of deadlines and levels, seconds."""
        return self._best.clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        for one in self._readings.values():
            one.clock = clock

    @property
    def num_passes(self) -> int:
        """Passes of all readings' networks so far."""
        return self._passes_before + sum(one.num_passes for one in self._readings.values())

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
        return self._trial.is_over

    @property
    def acceptance(self) -> dict[str, float]:
        """As `ReadingTrial.acceptance`, also of readings that were let go."""
        return self._trial.acceptance

    def open(self, request: DraftRequest) -> None:
        """Begin a request with all readings. Raises `DrafterError` without a token."""
        self._trial.forget(request.request_id)
        for one in self._readings.values():
            one.open(request)

    def close(self, request_id: str) -> None:
        """Forget a request; an unknown id is ignored."""
        self._trial.forget(request_id)
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
            self._trial.followed(commit.request_id, commit.base_len, commit.tokens.tolist())
        self._keep_best()

    def propose(
        self, queries: Sequence[Query], deadline: float | None = None
    ) -> Sequence[Proposal]:
        """What the best reading so far proposes; smaller where the deadline passes."""
        if self.is_over:
            return self._best.propose(queries, deadline)
        given = {name: one.propose(queries, deadline) for name, one in self._readings.items()}
        proposals = given[self._trial.best]
        # A draft that was cut by the deadline tells nothing.
        if deadline is None or self.clock() < deadline:
            for query, *drafts in zip(queries, *given.values(), strict=True):
                if query.assumed:
                    # The text may go another way.
                    continue
                self._trial.drafted(query.request_id, query.committed_len, drafts)
        self._trial.asked(len(queries))
        self._keep_best()
        return proposals

    @property
    def _best(self) -> HeadReader:
        return self._readings[self._trial.best]

    def _keep_best(self) -> None:
        if self.is_over and len(self._readings) > 1:
            self._passes_before = self.num_passes - self._best.num_passes
            self._readings = {self._trial.best: self._best}
