"""Stages that take a set time and answer what was recorded; what became of each row that they ran.

What a row is worth is known at once, since the text is: a node is right if the text goes through
it. One that is wrong is killed if the answer that says so comes before its own step's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import torch

from ....core.arrays import Float32, Int32, Span
from ....core.steps import StepInput, StepOutput, TreeRows
from ....core.tree.tree import unpack
from ....drafters.heads.drafter import feature_layers
from ....measure.replay.recording import RecordedAnswer, RowContext
from ....measure.replay.replay_pipeline import ReplayPipeline
from ....measure.simulate.cost_profile import CostProfile
from ....measure.simulate.host_clock import HostClock
from ....measure.simulate.simulation import answer_at
from ....models.load.checkpoint import resolve_head_path, resolve_model_path
from ....models.load.model_info import read_model_info
from ....training.heads.distilled_texts import DistilledText
from ....training.heads.target import Target

# The profile whose rows these are, by default.
PROFILE = "70b-8-h200"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of a stage for a step, for each of its rows beside, and of a message."""

    stage_s: float
    row_s: float
    hop_s: float


@dataclass(frozen=True, slots=True)
class Passage:
    """A step on its way.

    spans        when each stage computed it
    answered_at  when the engine has the answer, seconds
    """

    spans: tuple[Span, ...]
    answered_at: float


class StageLine:
    """Stages, each of which takes steps in order and one at a time."""

    __slots__ = ("_free_at", "_times")

    def __init__(self, num_stages: int, times: StageTimes) -> None:
        self._times = times
        self._free_at = [0.0] * num_stages

    def send(self, sent_at: float, num_rows: int) -> Passage:
        """Send a step of so many rows."""
        times, arrives = self._times, sent_at + self._times.hop_s
        spans: list[Span] = []
        for stage, free_at in enumerate(self._free_at):
            begin = max(arrives, free_at)
            self._free_at[stage] = end = begin + times.stage_s + times.row_s * num_rows
            spans.append((begin, end))
            arrives = end + times.hop_s
        return Passage(tuple(spans), arrives)


def row_seconds(profile: CostProfile) -> float:
    """What a row computes in one of a profile's stages."""
    operations = profile.device.operations * profile.device.operations_share
    return profile.target.operations / profile.num_stages / operations


class TextFeatures:
    """The states of the layers that one head reads, float32 [tokens, width] of each answer."""

    def __init__(self, model: str, head: str, answers: Sequence[RecordedAnswer]) -> None:
        layers = feature_layers(resolve_head_path(head), read_model_info(model))
        target = Target(resolve_model_path(model), torch.device("cpu"), layers)
        self.width = 0
        self._texts = {answer.seed: answer.text_ids for answer in answers}
        self._of: dict[int, Float32] = {}
        for answer in answers:
            text = DistilledText(answer.text_ids, ((len(answer.prompt_ids), len(answer.text_ids)),))
            [features] = target.batch([text], len(text.tokens)).features.numpy()
            self._of[answer.seed], self.width = features, features.shape[1]

    def of_step(self, step: StepInput, num_right: Mapping[int, int]) -> Float32:
        """float32 [rows, width]: of the step's `feature_requests`, as `StepOutput` has them.

        num_right: rows of the trees, by the place of a request, that the text goes through
        """
        found = [self._of_request(step, place, num_right) for place in step.heads.feature_requests]
        return np.concatenate(found) if found else np.zeros((0, self.width), dtype=np.float32)

    def _of_request(self, step: StepInput, place: int, num_right: Mapping[int, int]) -> Float32:
        first, end = step.request_starts[place : place + 2].tolist()
        positions = step.positions[first:end]
        if step.trees[place] is None:
            return self._of_prompt(int(positions[0]), tuple(step.token_ids[first:end].tolist()))
        low, high = np.searchsorted(step.logits_rows, (first, end)).tolist()
        own = self._of[int(step.sampling.seed[low])]
        if place in step.heads.chunk_requests:
            chosen = step.positions[step.logits_rows[low:high]]
            return own[np.minimum(chosen, len(own) - 1)]
        return own[positions[0] : positions[0] + num_right[place]]

    def _of_prompt(self, start: int, tokens: tuple[int, ...]) -> Float32:
        """Of a prompt, which is read in one chunk: texts that begin alike have the same states."""
        assert start == 0, "a prompt is longer than a step"
        for seed, text in self._texts.items():
            if text[: len(tokens)] == tokens:
                return self._of[seed][: len(tokens)]
        raise AssertionError("a step reads a text that is no recorded answer's")


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
            if step.heads.feature_requests:
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
        top_ids = np.zeros((len(step.probes.rows), step.probes.top_k), dtype=np.int32)
        for found, row in zip(top_ids, step.probes.rows.tolist(), strict=True):
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
