"""Stages that take a set time and answer what was recorded; what became of each row that they ran.

What a row is worth is known at once, since the text is: a node is right if the text goes through
it. One that is wrong is killed if the answer that says so comes before its own step's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from ....core.arrays import Int32, Span
from ....core.steps import StepInput, StepOutput, TreeRows
from ....core.tree.kernels import unpack
from ....measure.replay.recording import RecordedAnswer, RowContext
from ....measure.replay.replay_pipeline import ReplayPipeline
from ....measure.simulate.host_clock import HostClock
from ....measure.simulate.slowed_pipeline import answer_at
from .stage_line import Passage, StageLine, StageTimes
from .text_features import TextFeatures


class Fate(StrEnum):
    """Of a row of a tree."""

    ROOT = "root"
    RIGHT = "right"
    REFUSED = "refused"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class SlicePart:
    """A request's rows in a step: its seed, and what became of each, the root's first."""

    seed: int
    fates: tuple[Fate, ...]


@dataclass(frozen=True, slots=True)
class RunStep:
    """A step: its way through the stages, its trees, and how many rows of prompts and rows at all
    it has."""

    passage: Passage
    parts: tuple[SlicePart, ...]
    num_prompt_rows: int
    num_rows: int

    @property
    def spans(self) -> tuple[Span, ...]:
        """When each stage computed it."""
        return self.passage.spans


class ReplayedStages(ReplayPipeline):
    """Takes steps in order, one at a time in each stage.

    steps  that it ran
    """

    def __init__(
        self,
        answers: Sequence[RecordedAnswer],
        num_stages: int,
        times: StageTimes,
        clock: HostClock,
        features: TextFeatures | None = None,
    ) -> None:
        """`features`: what a head reads of the target, where one drafts."""
        super().__init__(answers)
        self._features = features
        self.num_stages = num_stages
        self.max_in_flight = num_stages + (num_stages > 1)
        self.steps: list[RunStep] = []
        self._clock = clock
        self._line = StageLine(num_stages, times)
        # The step that first ran the right row at a position of a text, by its seed.
        self._first_step: dict[tuple[int, int], int] = {}
        # Positions of the last right token down to the row that wrote a slot, that row's included.
        self._right_until: dict[int, int] = {}
        # The token of the row that wrote a slot.
        self._token_at: dict[int, int] = {}

    def submit(self, step: StepInput) -> asyncio.Future[StepOutput]:
        """Answer when the last stage would."""
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        answer: asyncio.Future[StepOutput] = loop.create_future()
        with self._clock.stopped():
            self._token_at.update(zip(step.slots.tolist(), step.token_ids.tolist(), strict=True))
            output = self._answer(step)
            parts, num_prompt_rows = self._parts(step)
            num_rows = len(step.token_ids)
            passage = self._line.send(sent_at, num_rows)
            self.steps.append(RunStep(passage, tuple(parts.values()), num_prompt_rows, num_rows))
            if step.is_traced:
                output = replace(output, stage_spans=passage.spans)
            if step.feature_requests:
                assert self._features is not None, "nobody said that a head would draft"
                known = {place: 1 + p.fates.count(Fate.RIGHT) for place, p in parts.items()}
                output = replace(output, features=self._features.of_step(step, known))
        answer_at(passage.answered_at, answer, output)
        return answer

    def _parts(self, step: StepInput) -> tuple[dict[int, SlicePart], int]:
        """Those of the step's trees, by the places of their requests, and its rows of prompts."""
        starts = step.request_starts.tolist()
        chosen = set(step.logits_rows.tolist())
        parts: dict[int, SlicePart] = {}
        num_prompt_rows = 0
        for owner, tree in enumerate(step.trees):
            first, end = starts[owner], starts[owner + 1]
            if tree is None:
                num_prompt_rows += end - first
                continue
            # Rows of probes come last, and get no token.
            rows = [row for row in range(first, end) if row in chosen]
            place = int(np.searchsorted(step.logits_rows, first))
            seed = int(step.sampling.seed[place])
            parts[owner] = self._part(step, tree, rows, seed, end - first)
        return parts, num_prompt_rows

    def _part(
        self, step: StepInput, tree: TreeRows, rows: Sequence[int], seed: int, num_own: int
    ) -> SlicePart:
        visible = unpack(tree.ancestors, len(tree.slots))
        fates: list[Fate] = []
        for index, row in enumerate(rows):
            position, slot = int(step.positions[row]), int(step.slots[row])
            right = position - 1
            if index:
                own_column = len(tree.slots) - num_own + index
                right = self._right_until[_parent_slot(tree, visible[index], own_column)]
            is_right = right == position - 1
            is_right = is_right and self._token(seed, position) == int(step.token_ids[row])
            self._right_until[slot] = position if is_right else right
            if is_right:
                self._first_step.setdefault((seed, position), step.step_id)
                fates.append(Fate.RIGHT if index else Fate.ROOT)
            else:
                is_killed = self._first_step[seed, right] < step.step_id
                fates.append(Fate.KILLED if is_killed else Fate.REFUSED)
        return SlicePart(seed, tuple(fates))

    def _top_next_tokens(self, step: StepInput) -> Int32:
        """As the recording has them; rows of slices follow rows of other steps, too."""
        top_ids = np.zeros((len(step.probe_rows), step.probe_top_k), dtype=np.int32)
        for found, row in zip(top_ids, step.probe_rows.tolist(), strict=True):
            ids = self._predictions.after(self._context(step, row))[: len(found)]
            found[: len(ids)] = ids
        return top_ids

    def _context(self, step: StepInput, row: int) -> RowContext:
        owner = int(np.searchsorted(step.request_starts, row, side="right")) - 1
        first, tree = int(step.request_starts[owner]), step.trees[owner]
        assert tree is not None
        place = int(np.searchsorted(step.logits_rows, first))
        visible = unpack(tree.ancestors[row - first : row - first + 1], len(tree.slots))
        columns = np.flatnonzero(visible[0])
        columns = columns[np.argsort(tree.positions[columns], kind="stable")]
        tokens = tuple(self._token_at[slot] for slot in tree.slots[columns].tolist())
        start = int(tree.positions[columns[0]])
        return RowContext(int(step.sampling.seed[place]), start, tokens)


def _parent_slot(tree: TreeRows, visible: Int32, own_column: int) -> int:
    """The KV slot of the node that one follows: the deepest that it sees beside itself."""
    columns = np.flatnonzero(visible)
    columns = columns[columns != own_column]
    return int(tree.slots[columns[np.argmax(tree.positions[columns])]])
