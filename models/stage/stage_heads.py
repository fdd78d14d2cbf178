"""The trained heads that draft on the last stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ...core.arrays import Int32
from ...core.errors import place_of
from ...core.pipelined.walk import ChunkWalk, PipelinedWalks
from ...core.steps import HeadDrafts, HeadTask, StepInput, StepOutput, VerificationResult
from ...core.verify.walk import CommittedRows, committed_rows, load_walk
from ..device import to_device
from .gpu_path import Capture

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Consecutive failures after which a head is disabled.
MOST_FAILURES = 3
# Rows of steps without drafts that wait to be handed to the heads together. Handing them over takes
# a percent of a short step, with cold caches, and little more for the rows of several steps.
MOST_DELAYED_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False)
class LastStageParts:
    """The modules that a head shares with the last stage.

    embed       None if another stage has the embeddings
    norm        states [rows, hidden_size] as the output head reads them
    project     [rows, vocabulary] of normed states
    num_slots   of the stage's KV cache, in blocks of `block_size`
    capture     makes graphs in the memory of the stage's own; None: it has none
    """

    embed: nn.Module | None
    norm: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor]
    softcap: float | None
    dtype: torch.dtype
    device: torch.device
    num_slots: int
    block_size: int
    capture: Capture | None = None


class TextRows(NamedTuple):
    """New rows of texts, request by request.

    slots, positions  int32 [n] of the rows
    following         int32 [n] the tokens after their own
    starts            int32 [requests + 1]  rows of request r are starts[r]:starts[r+1]
    keys              of the requests; empty: they are not identified
    num_known          int32 [requests] number of each request's first rows that came before; None:
                      no such rows
    """

    slots: Int32
    positions: Int32
    following: Int32
    starts: Int32
    keys: tuple[int, ...]
    num_known: Int32 | None = None

    def continued(self) -> Iterator[tuple[int, int, list[int]]]:
        """For each continued request: its key, the earlier tokens of its text, and the new ones."""
        following, ends = self.following.tolist(), self.starts[1:].tolist()
        firsts = self.starts[:-1] if self.num_known is None else self.starts[:-1] + self.num_known
        for key, first, end in zip(self.keys, firsts.tolist(), ends, strict=False):
            if first < end:
                # After the first row's own token, which was known already.
                yield key, int(self.positions[first]) + 1, following[first:end]

    def length(self, place: int) -> int:
        """Length of a request's text after these rows, including the token after the last one."""
        return int(self.positions[self.starts[place + 1] - 1]) + 2


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
        """The content of these slots, int32 [n], was overwritten."""
        ...

    def release(self) -> None:
        """Free the cached texts of an unused head; a later task starts from scratch."""
        ...

    def read_later(self, texts: TextRows, features: Tensor) -> None:
        """Keep rows of all requests until drafts are wanted; features float32 [rows, width]."""
        ...

    def draft(
        self, step: StepInput, texts: TextRows, features: Tensor, task: HeadTask
    ) -> HeadDrafts:
        """Draft after the committed rows, whose features are float32 [rows, width]. Rows of
        requests outside the task are kept for later."""
        ...


MakeHeads = Callable[[LastStageParts], Sequence[StageHead]]


class StageHeads:
    """Heads of one stage, by name. Errors of a head never fail a step."""

    def __init__(self, heads: Sequence[StageHead], features_of: Callable[[Tensor], Tensor]) -> None:
        """`features_of`: float32 [n, width] of n rows of a step's states."""
        self._heads = {head.name: head for head in heads}
        self._failures = dict.fromkeys(self._heads, 0)
        # The heads that had tasks in the previous step.
        self._in_use: frozenset[str] = frozenset()
        self._pipelined_trees = PipelinedFeatures()
        self._delayed: list[_DelayedRows] = []
        self._features_of = features_of
        load_walk()

    @property
    def kv_bytes(self) -> int:
        """Bytes of all their caches."""
        return sum(head.kv_bytes for head in self._heads.values())

    def reset(self) -> None:
        """Forget all texts."""
        self._delayed.clear()
        self._pipelined_trees.clear()
        for head in self._heads.values():
            head.reset()

    def move(self, moves: Int32) -> None:
        """Copy slots, int32 [m, 2], in all caches."""
        self._read_delayed()
        self._pipelined_trees.move(moves)
        for head in self._heads.values():
            head.move(moves)

    def draft(
        self,
        step: StepInput,
        target_tokens: Int32,
        results: tuple[VerificationResult, ...] | None,
        states: Tensor,
    ) -> tuple[HeadDrafts, ...]:
        """The drafts of the step's head tasks, in order.

        target_tokens  int32 [len(logits_rows)] as committed
        results        of the acceptance rule; None: `target_tokens` decide
        states         [rows, ..] of the step; valid until the next one
        """
        self._release(step)
        if _can_wait(step):
            rows = step.slots, step.positions, target_tokens
            self._delay(_DelayedRows(step, step.request_keys, *rows, states.clone()))
            return ()
        self._read_delayed()

        def features(wanted: Int32) -> Tensor:
            return self._features_of(states[to_device(wanted, states.device)])

        self._overwritten(step.slots)
        if not step.heads.tasks:
            self._pipelined_trees.clear()
            return ()
        committed = committed_rows(step, target_tokens, results)
        rows = committed.rows
        texts = TextRows(
            step.slots[rows], step.positions[rows], committed.following, committed.starts,
            step.request_keys,
        )  # fmt: skip
        # Committed rows ascend, so as many as the step has are all of them.
        is_all = len(rows) == len(states)
        committed_features = self._features_of(states) if is_all else features(rows)
        last_rows = _last_rows(step, committed)
        at_leaves: tuple[int, ...] = ()
        if step.heads.chunk_requests:
            pipelined_trees = self._pipelined_trees.follow(step, target_tokens, features)
            at_leaves = tuple(place for place, own in pipelined_trees.items() if own.walk.at_leaf)
            texts, committed_features = _with_streams(texts, committed_features, pipelined_trees)
        num_accepted = _num_accepted(step, texts)
        return tuple(
            self._drafted(
                step, texts, committed_features, task.after(num_accepted, at_leaves)
            )._replace(last_rows=last_rows)
            for task in step.heads.tasks
        )

    def decoded(
        self,
        step: StepInput,
        rows: tuple[Int32, Int32],
        output: StepOutput,
        states: Tensor | None,
    ) -> None:
        """Keep the states of a multi-step decoding step until drafts are wanted.

        rows    slots and positions of each pass, int32 [passes, requests] each
        states  [passes, requests, ..], kept by nobody else; None: no head has a task
        """
        self._release(step)
        slots, positions = rows
        if states is None:
            self._read_delayed()
            self._overwritten(slots.ravel())
            return
        assert output.decoded is not None
        count = output.decoded.shape[1]
        self._delay(
            _DelayedRows(
                step, step.request_keys * count, slots[:count].ravel(), positions[:count].ravel(),
                output.decoded.T.ravel(), states[:count].flatten(0, 1),
            )
        )  # fmt: skip

    def _delay(self, rows: _DelayedRows) -> None:
        self._delayed.append(rows)
        if sum(len(one.slots) for one in self._delayed) >= MOST_DELAYED_ROWS:
            self._read_delayed()

    def _read_delayed(self) -> None:
        """Hand the heads the rows of the steps that were delayed, all at once."""
        if not self._delayed:
            return
        steps, keys, slots, positions, following, states = zip(*self._delayed, strict=True)
        self._delayed.clear()
        all_slots = np.concatenate(slots)
        texts = TextRows(
            all_slots, np.concatenate(positions), np.concatenate(following),
            np.arange(len(all_slots) + 1, dtype=np.int32), tuple(chain.from_iterable(keys)),
        )  # fmt: skip
        self._overwritten(all_slots)
        features = self._features_of(torch.cat(states))
        for task in steps[-1].heads.tasks:
            head = self._heads[task.source]
            work = partial(head.read_later, texts, features)
            self._supervised(head.name, steps[-1], work)

    def _overwritten(self, slots: Int32) -> None:
        for head in self._heads.values():
            head.overwritten(slots)

    def _release(self, step: StepInput) -> None:
        """Free the caches of heads without a task, which the engine no longer uses."""
        in_use = frozenset(task.source for task in step.heads.tasks)
        if in_use == self._in_use:
            return
        self._read_delayed()
        for name in self._in_use - in_use:
            self._heads[name].release()
        self._in_use = in_use

    def _drafted(
        self, step: StepInput, texts: TextRows, states: Tensor, task: HeadTask
    ) -> HeadDrafts:
        head = self._heads[task.source]
        work = partial(head.draft, step, texts, states, task)
        drafts = self._supervised(head.name, step, work)
        if drafts is None:
            return HeadDrafts(head.name, 0.0, ())
        # Keeping rows for later does not show that it can draft.
        self._failures[head.name] = 0
        if not drafts.proposals:
            return drafts
        lengths = map(texts.length, task.requests)
        return drafts._replace(texts=tuple(zip(task.requests, lengths, strict=True)))

    def _supervised(self, name: str, step: StepInput, work: Callable[[], T]) -> T | None:
        """A head's result for a step; None if it fails, or is disabled after too many failures."""
        if self._failures[name] >= MOST_FAILURES:
            return None
        try:
            return work()
        except Exception as error:
            # A failed draft must not fail the step: the target's tokens are computed already.
            self._failures[name] += 1
            if self._failures[name] == MOST_FAILURES:
                self._heads[name].release()
            logger.warning(
                "event=head_failed head=%s step_id=%d failures=%d of %d error=%s",
                name, step.step_id, self._failures[name], MOST_FAILURES, place_of(error),
            )  # fmt: skip
            logger.debug("event=head_failed head=%s", name, exc_info=True)
            return None


class _DelayedRows(NamedTuple):
    """Rows of a step behind which nothing is drafted: one of each request in each of its passes.

    keys    of each row's request; empty: they are not identified
    slots, positions, following  int32 [rows]  as in `TextRows`
    states  [rows, ..]  a copy
    """

    step: StepInput
    keys: tuple[int, ...]
    slots: Int32
    positions: Int32
    following: Int32
    states: Tensor


def _can_wait(step: StepInput) -> bool:
    """Whether each request has one row and a target token after it, and no head is to read any."""
    num_rows, heads = len(step.token_ids), step.heads
    return (
        num_rows == len(step.trees) == len(step.logits_rows)
        and bool(heads.tasks)
        and not heads.chunk_requests
        and not any(task.requests for task in heads.tasks)
    )


def _last_rows(step: StepInput, committed: CommittedRows) -> Int32:
    """`HeadDrafts.last_rows`: int32 [trees that are no chunks]."""
    places = np.delete(np.arange(_num_trees(step)), step.heads.chunk_requests)
    return committed.rows[committed.starts[1:][places] - 1] - step.request_starts[places]


def _with_streams(
    texts: TextRows, states: Tensor, pipelined_trees: Mapping[int, PipelinedRows]
) -> tuple[TextRows, Tensor]:
    """Texts and their features, with those of pipelined requests, by place."""
    own = np.stack([texts.slots, texts.positions, texts.following], axis=1)
    rows, values, num_known = list[Int32](), list[Tensor](), list[int]()
    for place, (first, end) in enumerate(pairwise(texts.starts.tolist())):
        pipelined = pipelined_trees.get(place)
        if pipelined is None:
            rows.append(own[first:end])
            values.append(states[first:end])
            num_known.append(0)
        else:
            rows.append(np.array(pipelined.walk.rows, dtype=np.int32))
            values.append(pipelined.features)
            num_known.append(pipelined.walk.num_known)
    starts = np.array([0, *map(len, rows)], dtype=np.int32).cumsum(dtype=np.int32)
    slots, positions, following = np.concatenate(rows).T.copy()
    known = np.array(num_known, dtype=np.int32)
    return TextRows(slots, positions, following, starts, texts.keys, known), torch.cat(values)


def _num_accepted(step: StepInput, texts: TextRows) -> list[int]:
    """Number of accepted nodes of each tree in the step; -1 for a tree chunk without new tokens."""
    counts = np.diff(texts.starts) - 1
    if texts.num_known is not None:
        counts -= texts.num_known
    return counts[: _num_trees(step)].tolist()


def _num_trees(step: StepInput) -> int:
    """Number of trees; prompt chunks come after the trees."""
    num_chunks = 0 if step.heads.following_tokens is None else len(step.heads.following_tokens)
    return len(step.trees) - num_chunks


class PipelinedRows(NamedTuple):
    """An accepted path through a tree chunk, and the features float32 [rows, width] of its rows."""

    walk: ChunkWalk
    features: Tensor


class PipelinedFeatures:
    """Keeps the features of rows of pipelined trees from chunk to chunk."""

    def __init__(self) -> None:
        self._features: dict[int, Tensor] = {}
        self._walks = PipelinedWalks(self._features.pop)

    def clear(self) -> None:
        """Drop the features of all requests."""
        self._walks.clear()
        self._features.clear()

    def move(self, moves: Int32) -> None:
        """KV was copied between slots, int32 [m, 2] (from, to)."""
        self._walks.move(moves)

    def follow(
        self,
        step: StepInput,
        target_tokens: Int32,
        features: Callable[[Int32], Tensor],
    ) -> dict[int, PipelinedRows]:
        """The rows of the step's pipelined requests, by place.

        features  float32 [n, width] of rows int32 [n] of the step
        """
        found = {}
        for place in step.heads.chunk_requests:
            key, walk = step.request_keys[place], self._walks.follow(step, place, target_tokens)
            rows = list(walk.walked)
            if not walk.num_known:
                rows.insert(0, int(step.request_starts[place]))
            new = features(np.array(rows, dtype=np.int32))
            if walk.num_known:
                new = torch.cat([self._features[key][walk.num_passed :], new])
            self._features[key] = new
            found[place] = PipelinedRows(walk, new)
        return found
