"""What heads read in a step, hidden states of committed tokens, and what they draft at its end.

`HeadOrders` is what a step meets of them: `order` when it is planned, `add_to` when it is built,
and `note` with what `read_heads` finds in its output.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..arrays import Float32, Int32, lengths_of
from ..interfaces import ProposalSource
from ..proposals import Drafted, FeatureRows
from ..request.request import HeadOrder, RequestState
from ..speculation.draft_plan import DraftPlan
from ..steps import (
    EVERY_LENGTH_BUCKET,
    NO_HEADS,
    HeadDrafts,
    HeadInput,
    HeadTask,
    StepInput,
    StepOutput,
    is_in,
)
from ..verify.walk import Paths
from .parts import PromptChunk, TreeSteps


class HeadOrders:
    """What a request's next step does for heads: it hands out hidden states for those of other
    processes, and lets those of the last stage draft at its end."""

    __slots__ = ("_drafters", "_level_tokens")

    def __init__(self, drafters: ProposalSource) -> None:
        self._drafters = drafters
        # By head of the last stage: cost of one more draft level in tokens, as of its last plan.
        self._level_tokens: dict[str, float] = {}

    def open(self, state: RequestState, expected: Collection[str], max_nodes: int) -> None:
        """Order what the drafters that will probably be asked first need of the prompt."""
        state.wants_features = not self._drafters.feature_drafters.isdisjoint(expected)
        state.head_orders = {
            name: HeadOrder(max_nodes, EVERY_LENGTH_BUCKET)
            for name in self._drafters.stage_heads
            if name in expected
        }

    def order(
        self, states: Sequence[RequestState], plan: DraftPlan, sizes: Mapping[str, int]
    ) -> None:
        """Order the hidden states that asked drafters read, and drafts of at most `sizes` nodes."""
        names = self._drafters.feature_drafters
        if names:
            wanting = set[str]().union(*(plan.by_drafter.get(name, ()) for name in names))
            for state in states:
                state.wants_features = state.request_id in wanting
        if self._drafters.stage_heads:
            for state in states:
                state.head_orders = {}
            by_id = {state.request_id: state for state in states}
            self._level_tokens.update(plan.level_tokens)
            for name, buckets_by_id in plan.heads.items():
                for one, length_buckets in buckets_by_id.items():
                    by_id[one].head_orders[name] = HeadOrder(sizes[one], length_buckets)

    def add_to(self, step: StepInput, trees: TreeSteps, chunks: Sequence[PromptChunk]) -> StepInput:
        """The step with what was ordered of its requests, if anything was.

        A prompt chunk is drafted behind if it is the last one.
        """
        heads, tree_chunks = self._drafters.stage_heads, tuple(sorted(trees.tree_chunks))
        states = [*trees.states, *(chunk.state for chunk in chunks)]
        wanted = tuple(index for index, state in enumerate(states) if state.wants_features)
        if not (heads or tree_chunks or wanted):
            return step
        tasks, following_tokens = (), None
        if heads:
            tasks = _tasks(heads, trees, chunks, self._level_tokens)
            following_tokens = _following_tokens(chunks)
        return replace(step, heads=HeadInput(wanted, tree_chunks, tasks, following_tokens))

    def note(self, results: HeadResults) -> None:
        """Keep hidden states for the next message to heads of other processes, and what those of
        the last stage drafted for the next step."""
        if results.features:
            self._drafters.note_features(results.features)
        if results.drafted:
            self._drafters.note_drafted(results.drafted)


def is_ordered(state: RequestState) -> bool:
    """Whether heads want anything of the request's next step."""
    return state.wants_features or bool(state.head_orders)


class HeadResults(NamedTuple):
    """What a step brought for heads, and of them.

    features  of the requests whose drafters asked for them
    drafted   by heads of the last stage, for the next step
    """

    features: Sequence[FeatureRows] = ()
    drafted: Sequence[Drafted] = ()

    @property
    def seconds(self) -> float:
        """Seconds of the step that drafting took."""
        return sum(drafted.seconds for drafted in self.drafted)

    def without(self, request_ids: Collection[str]) -> HeadResults:
        """These without what is of some requests."""
        return HeadResults(
            [rows for rows in self.features if rows.request_id not in request_ids],
            [
                own._replace(
                    proposals=tuple(one for one in own.proposals if one[0] not in request_ids)
                )
                for own in self.drafted
            ],
        )


NO_HEAD_RESULTS = HeadResults()


def read_heads(
    step: StepInput,
    request_ids: Sequence[str],
    paths: Paths,
    output: StepOutput,
    of_tree_chunks: Sequence[FeatureRows],
) -> HeadResults:
    """The results of a step's heads; `of_tree_chunks`: features that chunks gave already.

    `paths` are those through the step's trees, whose requests come first in it.
    """
    if step.heads is NO_HEADS:
        return NO_HEAD_RESULTS
    features = [*_features_of(step, request_ids, paths, output), *of_tree_chunks]
    return HeadResults(features, _drafted_of(step, request_ids, paths, output))


def _features_of(
    step: StepInput, request_ids: Sequence[str], paths: Paths, output: StepOutput
) -> list[FeatureRows]:
    """Features of the committed tokens that each of the step's `feature_requests` had in it, but of
    chunks."""
    parts = _parts(step, paths, output)
    return [
        FeatureRows(request_ids[index], int(step.context_lens[index]), values)
        for index, values in parts.items()
        if index not in step.heads.chunk_requests
    ]


def features_of_tree_chunks(
    step: StepInput, paths: Paths, output: StepOutput
) -> dict[int, Float32]:
    """Features of the root and all nodes of chunks whose are wanted, by index of the request."""
    if not step.heads.chunk_requests:
        return {}
    parts = _parts(step, paths, output)
    return {index: parts[index] for index in step.heads.chunk_requests if index in parts}


def _parts(step: StepInput, paths: Paths, output: StepOutput) -> dict[int, Float32]:
    """The rows of each of the step's `feature_requests`."""
    if not step.heads.feature_requests:
        return {}
    assert output.features is not None, "the stage did not do what it was asked"
    lengths, starts = lengths_of(paths.ends).tolist(), step.request_starts.tolist()
    parts, first = {}, 0
    for index in step.heads.feature_requests:
        count = lengths[index] if index < len(lengths) else starts[index + 1] - starts[index]
        if index in step.heads.chunk_requests:
            chosen = np.searchsorted(step.logits_rows, step.request_starts[index : index + 2])
            count = int(chosen[1] - chosen[0])
        parts[index] = output.features[first : first + count]
        first += count
    assert first == len(output.features), "stage and coordinator walked different ways"
    return parts


def _tasks(
    heads: Sequence[str],
    trees: TreeSteps,
    chunks: Sequence[PromptChunk],
    level_tokens: Mapping[str, float],
) -> tuple[HeadTask, ...]:
    # Of each request: its orders, whether drafts are wanted, and whether nodes may be accepted.
    has_nodes = (trees.trees.sizes > 0).tolist()
    for index in trees.tree_chunks:
        has_nodes[index] = True
    wanting = [
        (state.head_orders, True, own) for state, own in zip(trees.states, has_nodes, strict=True)
    ]
    wanting += [(chunk.state.head_orders, chunk.wants_token, True) for chunk in chunks]
    tasks = []
    for head in heads:
        wanted = [
            (index, order.max_nodes * drafts, order.length_buckets)
            for index, (own, drafts, may_accept) in enumerate(wanting)
            if (order := own.get(head)) is not None
            and (may_accept or is_in(order.length_buckets, 0))
        ]
        indices, max_nodes, length_buckets = zip(*wanted, strict=True) if wanted else ((), (), ())
        tasks.append(
            HeadTask(head, indices, max_nodes, length_buckets, level_tokens.get(head, 0.0))
        )
    return tuple(tasks)


def _following_tokens(chunks: Sequence[PromptChunk]) -> Int32:
    """int32 [chunks]: `HeadInput.following_tokens`."""
    texts = [(chunk.state.token_ids, chunk.end) for chunk in chunks]
    behind = [tokens[end] if end < len(tokens) else -1 for tokens, end in texts]
    return np.array(behind, dtype=np.int32)


def _drafted_of(
    step: StepInput, request_ids: Sequence[str], paths: Paths, output: StepOutput
) -> list[Drafted]:
    """What those of the step's heads drafted that did."""
    if not output.head_drafts:
        return []
    _check_walks(step, paths, output.head_drafts)
    drafted = []
    for task, drafts in zip(step.heads.tasks, output.head_drafts, strict=True):
        if not drafts.proposals:
            continue
        sizes = dict(zip(task.requests, task.max_nodes, strict=True))
        own = tuple(
            (request_ids[index], length, proposal)
            for (index, length), proposal in zip(drafts.texts, drafts.proposals, strict=True)
            if sizes[index]
        )
        drafted.append(Drafted(drafts.source, drafts.seconds, own, drafts.num_levels))
    return drafted


def _check_walks(step: StepInput, paths: Paths, every: Sequence[HeadDrafts]) -> None:
    """For each head the stage walked the trees as the coordinator does."""
    tree_chunks = step.heads.chunk_requests
    ends = np.delete(paths.ends, tree_chunks) if tree_chunks else paths.ends
    # The last node of a path tells all of it.
    last_rows, checked = paths.rows[ends - 1], None
    for drafts in every:
        # Within one process all heads have the same array.
        if drafts.last_rows is not None and drafts.last_rows is not checked:
            checked = drafts.last_rows
            is_same = np.array_equal(checked, last_rows)
            assert is_same, "stage and coordinator walked different ways"
