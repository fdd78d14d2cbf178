"""What heads of the last stage are told in a step, and what they drafted, by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..arrays import Int32
from ..proposals import Drafted
from ..request.request import RequestState
from ..steps import HeadDrafts, HeadTask, StepInput, StepOutput
from ..verify.walk import Paths
from .prompt_chunk import PromptChunk


def with_head_tasks(
    step: StepInput,
    heads: Sequence[str],
    states: Sequence[RequestState],
    chunks: Sequence[PromptChunk],
    level_tokens: Mapping[str, float],
) -> StepInput:
    """The step with a task for each head, of the requests that want drafts of it.

    `level_tokens` are those of `HeadTask`, by head. `states` have trees; a prompt chunk is drafted
    behind if it is the last one.
    """
    if not heads:
        return step
    tasks = _tasks(heads, states, chunks, level_tokens)
    return replace(step, head_tasks=tasks, following_tokens=_following_tokens(chunks))


def _tasks(
    heads: Sequence[str],
    states: Sequence[RequestState],
    chunks: Sequence[PromptChunk],
    level_tokens: Mapping[str, float],
) -> tuple[HeadTask, ...]:
    wanting = [(state.head_orders, True) for state in states]
    wanting += [(chunk.state.head_orders, chunk.wants_token) for chunk in chunks]
    tasks = []
    for head in heads:
        wanted = [
            (place, order.max_nodes * drafts, order.reaches)
            for place, (own, drafts) in enumerate(wanting)
            if (order := own.get(head)) is not None
        ]
        places, max_nodes, reaches = zip(*wanted, strict=True) if wanted else ((), (), ())
        tasks.append(HeadTask(head, places, max_nodes, reaches, level_tokens.get(head, 0.0)))
    return tuple(tasks)


def _following_tokens(chunks: Sequence[PromptChunk]) -> Int32:
    """int32 [chunks]: `StepInput.following_tokens`."""
    texts = [(chunk.state.token_ids, chunk.end) for chunk in chunks]
    behind = [tokens[end] if end < len(tokens) else -1 for tokens, end in texts]
    return np.array(behind, dtype=np.int32)


def drafted_of(
    step: StepInput, request_ids: Sequence[str], paths: Paths, output: StepOutput
) -> list[Drafted]:
    """What those of the step's heads drafted that did. `paths`: through its trees, which come
    first in it.
    """
    if not output.head_drafts:
        return []
    _check_walks(step, paths, output.head_drafts)
    drafted = []
    for task, drafts in zip(step.head_tasks, output.head_drafts, strict=True):
        if not drafts.proposals:
            continue
        sizes = dict(zip(task.places, task.max_nodes, strict=True))
        own = tuple(
            (request_ids[place], length, proposal)
            for (place, length), proposal in zip(drafts.texts, drafts.proposals, strict=True)
            if sizes[place]
        )
        drafted.append(Drafted(drafts.source, drafts.seconds, own, drafts.num_levels))
    return drafted


def _check_walks(step: StepInput, paths: Paths, every: Sequence[HeadDrafts]) -> None:
    """For each head the stage walked the trees as the coordinator does."""
    ends = np.delete(paths.ends, step.slice_requests) if step.slice_requests else paths.ends
    # The last node of a path tells all of it.
    last_rows, checked = paths.rows[ends - 1], None
    for drafts in every:
        # Within one process all heads have the same array.
        if drafts.last_rows is not None and drafts.last_rows is not checked:
            checked = drafts.last_rows
            is_same = np.array_equal(checked, last_rows)
            assert is_same, "stage and coordinator walked different ways"
