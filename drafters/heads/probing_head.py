"""A head of the last stage whose config leaves open how it is read: its first drafts tell."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...core.arrays import Int32
from ...core.steps import HeadDrafts, HeadTask, StepInput
from ...models.stage.stage_heads import StageHead, TextRows
from .reading_trial import ReadingTrial


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
