"""The trained heads that draft beside the last stage's layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from ...core.arrays import Int32
from ...core.errors import place_of
from ...core.steps import HeadDrafts, HeadTask, StepInput, StepOutput, VerificationResult
from ...core.verify.accepted_rows import CommittedRows, committed_rows

logger = logging.getLogger(__name__)

T = TypeVar("T")

# So many failures of a head in a row end it.
MOST_FAILURES = 3


@dataclass(frozen=True, slots=True, eq=False)
class LastStageParts:
    """What a head shares with the last stage.

    embed       None where another stage has the embeddings
    norm        states [rows, hidden_size] as the output head reads them
    project     [rows, vocabulary] of normed states
    num_slots   of the stage's KV cache, in blocks of `block_size`
    """

    embed: nn.Module | None
    norm: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor]
    softcap: float | None
    dtype: torch.dtype
    device: torch.device
    num_slots: int
    block_size: int


class StageHead(Protocol):
    """A head with keys and values of its own in the slots of the stage's cache."""

    @property
    def name(self) -> str:
        """The `source` of its drafts."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of its cache."""
        ...

    def reset(self) -> None:
        """Forget all texts."""
        ...

    def move(self, moves: Int32) -> None:
        """Copy slots, int32 [m, 2]; all are read first."""
        ...

    def overwritten(self, slots: Int32) -> None:
        """What stood in these slots, int32 [n], is gone."""
        ...

    def read_later(self, key: int, features: Tensor, following: Int32, positions: Int32) -> None:
        """Keep rows of a request, by its key, until drafts are wanted: features [n, width], the
        tokens behind theirs and their positions, int32 [n]."""
        ...

    def draft(
        self, step: StepInput, committed: CommittedRows, features: Tensor, task: HeadTask
    ) -> HeadDrafts:
        """Do a task behind the committed rows, whose features are float32 [rows, width]."""
        ...


MakeHeads = Callable[[LastStageParts], Sequence[StageHead]]


class StageHeads:
    """Heads of one stage, by name. Nothing that one of them raises ends a step."""

    def __init__(self, heads: Sequence[StageHead]) -> None:
        self._heads = {head.name: head for head in heads}
        self._failures = dict.fromkeys(self._heads, 0)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all their caches."""
        return sum(head.kv_bytes for head in self._heads.values())

    def reset(self) -> None:
        """Forget all texts."""
        for head in self._heads.values():
            head.reset()

    def move(self, moves: Int32) -> None:
        """Copy slots, int32 [m, 2], in all caches."""
        for head in self._heads.values():
            head.move(moves)

    def draft(
        self,
        step: StepInput,
        target_tokens: Int32,
        results: tuple[VerificationResult, ...] | None,
        features: Callable[[Int32], Tensor],
    ) -> tuple[HeadDrafts, ...]:
        """What the step's `head_tasks` ask for, in order.

        target_tokens  int32 [len(logits_rows)]  as they are committed
        results        of the rule that decides about the trees; None: `target_tokens` do
        features       float32 [n, width] of rows int32 [n]
        """
        for head in self._heads.values():
            head.overwritten(step.slots)
        if not step.head_tasks:
            return ()
        committed = committed_rows(step, target_tokens, results)
        states = features(committed.rows)
        return tuple(self._drafted(step, committed, states, task) for task in step.head_tasks)

    def decoded(
        self,
        step: StepInput,
        rows: tuple[Int32, Int32],
        output: StepOutput,
        features: Tensor | None,
    ) -> None:
        """Keep what a step of several tokens a request says of them, until drafts are wanted.

        rows      slots and positions of each pass, int32 [passes, requests] each
        features  float32 [passes, requests, width]; None: the heads do without
        """
        slots, positions = rows
        assert output.decoded is not None
        count = output.decoded.shape[1]
        for head in self._heads.values():
            head.overwritten(slots.ravel())
            if features is None or not step.request_keys:
                continue
            for place, key in enumerate(step.request_keys):
                own = features[:count, place], output.decoded[place], positions[:count, place]
                self._supervised(head.name, step, partial(head.read_later, key, *own))

    def _drafted(
        self, step: StepInput, committed: CommittedRows, states: Tensor, task: HeadTask
    ) -> HeadDrafts:
        head = self._heads[task.source]
        work = partial(head.draft, step, committed, states, task)
        drafts = self._supervised(head.name, step, work)
        if drafts is None:
            return HeadDrafts(head.name, 0.0, ())
        # Keeping rows for later does not show that it can draft.
        self._failures[head.name] = 0
        return drafts

    def _supervised(self, name: str, step: StepInput, work: Callable[[], T]) -> T | None:
        """What a head makes of a step; None where it raises, or has raised too often."""
        if self._failures[name] >= MOST_FAILURES:
            return None
        try:
            return work()
        except Exception as error:
            # Drafts are worth no step: the target's tokens are there already.
            self._failures[name] += 1
            logger.warning(
                "event=head_failed head=%s step_id=%d failures=%d of %d error=%s",
                name, step.step_id, self._failures[name], MOST_FAILURES, place_of(error),
            )  # fmt: skip
            logger.debug("event=head_failed head=%s", name, exc_info=True)
            return None
