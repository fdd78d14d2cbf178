"""Finds out how a head's config is to be read, where that leaves it open, by its first drafts.

Every reading drafts for every request, and the text judges them beside each other: nothing is run
for it, and no prompt is needed that is like those to come.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from ...core.arrays import Int32
from ...core.interfaces import Drafter, FeatureDrafter
from ...core.proposals import Commit, DraftRequest, FeatureLayers, FeatureRows, Proposal, Query
from ...core.steps import HeadDrafts, HeadTask, StepInput
from ...core.tree.proposal_batch import num_right
from ...models.stage.stage_heads import StageHead, TextRows

logger = logging.getLogger(__name__)

# Drafts of each reading that are compared. A wrong layout gets hardly a token right, a wrong norm
# some.
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
        them drafted something, and no other drafts for the text are being judged."""
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


class ProbingHead:
    """A `StageHead` that asks one of each reading, until one is kept (`ReadingTrial`).

    Until then each keeps a text by its own reading, and the best so far drafts.
    """

    def __init__(self, readings: Mapping[str, StageHead], trial: ReadingTrial) -> None:
        """`readings`: those of the trial, all of one name."""
        self._readings = dict(readings)
        self._trial = trial
        self.name = self._readings[trial.best].name

    @property
    def kv_bytes(self) -> int:
        """Bytes of all caches."""
        return sum(head.kv_bytes for head in self._readings.values())

    def reset(self) -> None:
        """Forget all texts; what the trial has found is kept."""
        self._trial.forget_all()
        for head in self._readings.values():
            head.reset()

    def release(self) -> None:
        """Free what all keep of texts."""
        self._trial.forget_all()
        for head in self._readings.values():
            head.release()

    def move(self, moves: Int32) -> None:
        """Copy slots, int32 [m, 2], in all caches."""
        for head in self._readings.values():
            head.move(moves)

    def overwritten(self, slots: Int32) -> None:
        """What stood in these slots is gone."""
        for head in self._readings.values():
            head.overwritten(slots)

    def read_later(self, texts: TextRows, features: Tensor) -> None:
        """Keep rows of all requests; they judge the drafts before them."""
        self._judge(texts)
        for head in self._readings.values():
            head.read_later(texts, features)

    def draft(
        self, step: StepInput, texts: TextRows, features: Tensor, task: HeadTask
    ) -> HeadDrafts:
        """What the best reading so far drafts, in the time that all of them took."""
        self._judge(texts)
        given = {
            name: head.draft(step, texts, features, task) for name, head in self._readings.items()
        }
        drafts = given[self._trial.best]
        if self._trial.is_over:
            return drafts
        for index, place in enumerate(task.requests):
            if texts.starts[place] < texts.starts[place + 1]:
                own = [one.proposals[index] for one in given.values()]
                self._trial.drafted(texts.keys[place], texts.length(place), own)
        self._trial.asked(sum(size > 0 for size in task.max_nodes))
        return drafts._replace(seconds=sum(one.seconds for one in given.values()))

    def _judge(self, texts: TextRows) -> None:
        if not self._trial.is_over:
            for key, length, tokens in texts.continued():
                self._trial.followed(key, length, tokens)
        if self._trial.is_over and len(self._readings) > 1:
            best = self._trial.best
            self._readings = {best: self._readings[best]}
