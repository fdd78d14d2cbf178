"""A step on its way through the pipeline, and what its output means for each request."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..arrays import Int32
from ..pipelined.chunks import read_chunk
from ..proposals import FeatureRows, TopNextTokens
from ..request.output import Chosen, token_log_prob
from ..request.request import RequestState
from ..speculation.draft_plan import DraftBatch
from ..steps import StepInput, StepOutput
from ..tree.tree import TreeBatch
from ..verify.walk import Paths, RowSlots, paths_of
from .heads import HeadResults, features_of_tree_chunks, read_heads
from .parts import PromptChunk, TreeStep, TreeSteps
from .probes import ProbeReader
from .trace import TracedStep


class TreeOutput(NamedTuple):
    """What a step gave for a request's tree.

    chosen           after the root and each node
    probe_ids        the next tokens after rows of probes, by source
    top_next_tokens  of the root and the nodes, in this order, by source
    """

    chosen: Chosen
    probe_ids: Mapping[str, Int32]
    top_next_tokens: Mapping[str, TopNextTokens]

    def behind(self, undelivered: Mapping[str, TopNextTokens]) -> TreeOutput:
        """With the next tokens that earlier chunks of the tree were given."""
        if not undelivered:
            return self
        joined = dict(undelivered)
        for source, own in self.top_next_tokens.items():
            joined[source] = own.behind(undelivered[source]) if source in undelivered else own
        return self._replace(top_next_tokens=joined)


# Of a tree of which only the walk is wanted.
NO_TREE_OUTPUT = TreeOutput(Chosen(np.empty(0, dtype=np.int32), None, None), {}, {})


class StepOutputReader:
    """Reads the output in the order in which `build_step` asked."""

    __slots__ = ("_next_chosen", "_next_scored", "_output", "_probes")

    def __init__(self, output: StepOutput) -> None:
        self._output = output
        self._probes = ProbeReader(output)
        self._next_chosen = self._next_scored = 0

    def of_trees(self, steps: TreeSteps) -> list[TreeOutput]:
        """`of_tree` for all; nothing where only the walks are wanted."""
        if self._output.log_probs.of_targets is not None or steps.extras:
            return [self.of_tree(step) for step in steps]
        self._next_chosen = len(steps) + len(steps.trees.nodes)
        return [NO_TREE_OUTPUT] * len(steps)

    def of_tree(self, step: TreeStep) -> TreeOutput:
        """What was chosen after the root and each node, and what drafters asked for."""
        return TreeOutput(self._chosen(step.num_chosen), *self._probes.of_tree(step))

    def of_prompt_chunk(self, chunk: PromptChunk) -> Chosen:
        """What was chosen after the chunk, if it asked; keeps its tokens' log-probabilities."""
        state = chunk.state
        if state.prompt_log_probs is not None and chunk.num_scored:
            first = self._next_scored
            self._next_scored += chunk.num_scored
            num_top = state.request.params.prompt_logprobs or 0
            scores, top = self._output.log_probs.scores, self._output.log_probs.scored_top
            assert scores is not None, "the stage did not do what it was asked"
            for index in range(chunk.num_scored):
                position = chunk.start + index + 1
                token = int(state.request.prompt_ids[position])
                log_prob = token_log_prob(token, scores, top, first + index, num_top)
                state.prompt_log_probs[position] = log_prob
        return self._chosen(int(chunk.wants_token))

    def _chosen(self, count: int) -> Chosen:
        first, self._next_chosen = self._next_chosen, self._next_chosen + count
        return Chosen.of_rows(self._output, slice(first, first + count))


# Multiple of the peak step time after which a step is lost.
SLOWEST = 20.0
# Weight of the newest step.
WEIGHT = 0.05
# Share of a step to wait for late masks; the bounds, in seconds, are below.
PATIENCE = 0.05
# Upper ends of the classes that steps are counted in, seconds.
STEP_BOUNDS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip


class StepResults(NamedTuple):
    """What a step's output means for its parts, in order.

    num_passes  of the step: tokens of each request, where no drafts were verified
    paths   through all trees
    step_paths  the same by rows of the step
    trees   what else was computed for each tree
    drafted  the trees as they were drafted, whose roots `paths` follow
    prompt_chunks  what was chosen after each prompt chunk; None: it does not count
    heads   for heads, and of those of the last stage
    """

    num_passes: int
    paths: Paths
    step_paths: Paths
    trees: Sequence[TreeOutput]
    drafted: TreeBatch
    prompt_chunks: Sequence[Chosen | None]
    heads: HeadResults

    def without(self, states: Sequence[RequestState], step: StepInFlight) -> StepResults:
        """These without what is of some of the step's requests."""
        indices = [index for index, own in enumerate(step.trees.states) if own in states]
        prompt_chunks = zip(step.prompt_chunks, self.prompt_chunks, strict=True)
        return self._replace(
            paths=self.paths.without(indices),
            step_paths=self.step_paths.without(indices),
            prompt_chunks=[
                None if chunk.state in states else chosen for chunk, chosen in prompt_chunks
            ],
            heads=self.heads.without({state.request_id for state in states}),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepInFlight:
    """What was submitted, when, and the output to come."""

    step: StepInput
    trees: TreeSteps
    prompt_chunks: Sequence[PromptChunk]
    output: asyncio.Future[StepOutput]
    draft_batch: DraftBatch | None
    sent_at: float
    traced: TracedStep | None
    block_size: int

    @property
    def states(self) -> list[RequestState]:
        """Its requests; those that were cancelled meanwhile, too."""
        return [*self.trees.states, *(chunk.state for chunk in self.prompt_chunks)]

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.step.slots)

    @property
    def row_slots(self) -> RowSlots:
        """Where the rows of its requests are."""
        return RowSlots(self.step.request_starts, self.step.slots)

    def seconds_left(self, limit_s: float, finished_at: float, now: float) -> float | None:
        """How long it may still take; None: for ever.

        `limit_s` counts from when it was sent, or the step before it finished (`finished_at`).
        """
        if math.isinf(limit_s):
            return None
        return max(0.0, max(self.sent_at, finished_at) + limit_s - now)

    def not_finite(self, output: StepOutput) -> list[tuple[RequestState, int]]:
        """Requests of which some rows have logits that are NaN or infinite, and how many nodes
        each had in the step."""
        scores = output.log_probs.scores
        has_bad_scores = scores is not None and bool(np.isnan(scores).any())
        if output.not_finite is None and not has_bad_scores:
            return []
        bad = np.empty(0, dtype=np.int32) if output.not_finite is None else output.not_finite
        nodes = [*self.trees.trees.sizes.tolist(), *(0 for _ in self.prompt_chunks)]
        rows = [1 + count for count in nodes[: len(self.trees.states)]]
        rows += [int(chunk.wants_token) for chunk in self.prompt_chunks]
        indices = set(np.searchsorted(np.cumsum(rows), bad, side="right").tolist())
        first = 0
        for index, chunk in enumerate(self.prompt_chunks, len(self.trees.states)):
            if scores is not None and chunk.state.prompt_log_probs is not None:
                end = first + chunk.num_scored
                if np.isnan(scores[first:end]).any():
                    indices.add(index)
                first = end
        return [(self.states[index], nodes[index]) for index in sorted(indices)]

    def results(self, output: StepOutput) -> StepResults:
        """Walk the trees by the target's tokens; what was computed for each part.

        Pipelined trees advance by it.
        """
        has_rule = any(own.candidates is not None for own in self.trees.extras.values())
        assert has_rule == (output.verification_results is not None), (
            "the stage did not do what it was asked"
        )
        reader = StepOutputReader(output)
        paths = paths_of(self.trees.trees, output)
        drafted, outputs = self.trees.drafted, reader.of_trees(self.trees)
        features: list[FeatureRows] = []
        step_paths = paths
        if self.trees.tree_chunks:
            paths, step_paths, drafted, outputs, features = self._read_chunks(
                paths, outputs, output
            )
        request_ids = [state.request_id for state in self.states]
        return StepResults(
            1 if output.decoded is None else output.decoded.shape[1],
            paths,
            step_paths,
            outputs,
            drafted,
            [reader.of_prompt_chunk(chunk) for chunk in self.prompt_chunks],
            read_heads(self.step, request_ids, paths, output, features),
        )

    def _read_chunks(
        self, paths: Paths, outputs: Sequence[TreeOutput], output: StepOutput
    ) -> tuple[Paths, Paths, TreeBatch, Sequence[TreeOutput], list[FeatureRows]]:
        """Paths, the same by rows of the step, drafted trees and outputs, those of chunks taken
        from their pipelined trees; and the features of what these commit."""
        steps, drafted = paths.of_each(), list(self.trees.drafted)
        by_rows = list(steps)
        outputs, features = list(outputs), list[FeatureRows]()
        values = features_of_tree_chunks(self.step, paths, output)
        firsts = [0, *(self.trees.trees.sizes + 1).cumsum().tolist()]
        for index, part in self.trees.tree_chunks.items():
            rows = slice(firsts[index], firsts[index + 1])
            targets = Chosen.of_rows(output, rows)._replace(features=values.get(index))
            read = read_chunk(self.trees.states[index], part, targets, self.block_size)
            steps[index], drafted[index] = read.path, read.drafted
            by_rows[index] = [
                (row, *step[1:]) for row, step in zip(read.rows, read.path, strict=True)
            ]
            features += read.features
            own = outputs[index]._replace(chosen=read.chosen)
            if self.trees.states[index].pipelined is part.pipelined:
                own = own.behind(part.pipelined.undelivered)
                # Drafters receive it with the next commit.
                part.pipelined.undelivered = {} if read.path else own.top_next_tokens
            outputs[index] = own
        return Paths.of(steps), Paths.of(by_rows), TreeBatch.of(drafted), outputs, features

    def give_up(self) -> None:
        """The output is not awaited any more; its error has been reported."""
        self.output.add_done_callback(_ignore)


class Flights:
    """The steps on their way, in order."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> StepInFlight:
        """The one that finishes next."""
        return self._steps[0]

    @property
    def finished(self) -> StepInFlight | None:
        """The oldest, if its output is there."""
        return self._steps[0] if self._steps and self._steps[0].output.done() else None

    def add(self, step: StepInFlight) -> None:
        """It was sent."""
        for state in step.states:
            state.in_flight += 1
        self._steps.append(step)

    def land(self) -> None:
        """The oldest has finished, or has failed."""
        for state in self._steps.popleft().states:
            state.in_flight -= 1

    def states(self) -> list[RequestState]:
        """The requests of all, each once."""
        return [*{id(state): state for step in self._steps for state in step.states}.values()]

    def drop(self) -> None:
        """Nobody waits for any of them."""
        while self._steps:
            self._steps[0].give_up()
            self.land()


def _ignore(output: asyncio.Future[StepOutput]) -> None:
    if not output.cancelled():
        output.exception()


LEAST_PATIENCE_S, MOST_PATIENCE_S = 0.0005, 0.02


class StepTimes(NamedTuple):
    """How many steps took how long.

    counts  by the classes of `STEP_BOUNDS_S`, those that took longer last
    sum_s   of all, seconds
    """

    counts: tuple[int, ...]
    sum_s: float


class StepDeadline:
    """Follows how long steps take. It knows no clock."""

    __slots__ = ("_counts", "_floor_s", "_mean_s", "_peak_s", "_sum_s")

    def __init__(self, floor_s: float) -> None:
        """`floor_s`: no step counts as hung before; its setting is `step_timeout_s`."""
        self._floor_s = floor_s
        self._mean_s = self._peak_s = self._sum_s = 0.0
        self._counts = [0] * (len(STEP_BOUNDS_S) + 1)

    def record(self, seconds: float) -> None:
        """Learn that a step took this many seconds."""
        self._counts[bisect_left(STEP_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds
        weight = WEIGHT if self._mean_s else 1.0
        self._mean_s += weight * (seconds - self._mean_s)
        # Falls back slowly: long prompts come now and then.
        self._peak_s = max(seconds, self._peak_s + WEIGHT * (self._mean_s - self._peak_s))

    @property
    def times(self) -> StepTimes:
        """How long they took, for metrics."""
        return StepTimes(tuple(self._counts), self._sum_s)

    @property
    def limit_s(self) -> float:
        """Seconds after which a step that has no output is lost."""
        return max(self._floor_s, SLOWEST * self._peak_s)

    @property
    def patience_s(self) -> float:
        """Seconds that a step may wait for some of its requests, so that the others lose little."""
        return min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, PATIENCE * self._mean_s))
