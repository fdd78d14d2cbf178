"""Steps of requests that arrive, go on, lose their KV, come back and end, of random numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from draftline.core.arrays import Int32
from draftline.core.steps import (
    EVERY_LENGTH_BUCKET,
    NO_HEADS,
    NO_LOG_PROBS,
    NO_PROBES,
    HeadInput,
    HeadTask,
    LogitEdits,
    LogProbInput,
    Penalties,
    ProbeInput,
    SamplingRows,
    StepInput,
    TreeCandidates,
    TreeRows,
    Verification,
)  # fmt: skip

NONE = np.empty(0, dtype=np.int32)
NUM_WORDS = 3
FLOATS = np.array([0.0, -0.0, 0.5, 1.0, np.nan], dtype=np.float32)


@dataclass
class _Request:
    """What a request's steps have in common, and what goes on from one to the next."""

    blocks: list[int]
    sampling: tuple[float, ...]
    tokens: list[int]
    counts: list[int]
    num_in_prompt: int
    biases: dict[int, float]
    has_penalties: bool
    mask_rows: int
    key: int = 0
    factors: tuple[float, float, float] = field(default=(1.0, 0.5, 0.25))


class StepWorld:
    """Requests by number of arrival; every `step` is of some of them, as they are then."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._requests: list[_Request] = []
        self._num_arrived = 0
        self._num_steps = 0
        self._masks = self._uint32(4)

    def arrive(self) -> None:
        """A request comes."""
        rng = self._rng
        tokens = rng.permutation(20)[: rng.integers(0, 9)].tolist()
        floats = rng.choice(FLOATS, 4)
        request = _Request(
            blocks=self._blocks(), tokens=tokens, counts=[0] * len(tokens),
            sampling=(*floats.tolist(), int(rng.integers(9)), int(rng.integers(-9, 9))),
            num_in_prompt=len(tokens), has_penalties=bool(rng.integers(2)),
            biases=dict.fromkeys(rng.permutation(9)[: rng.integers(0, 3)].tolist(), 0.5),
            mask_rows=int(rng.integers(-1, 2)), key=self._num_arrived,
        )  # fmt: skip
        self._num_arrived += 1
        self._requests.append(request)

    def end(self) -> None:
        """A request ends, by itself or by a cancel."""
        if self._requests:
            self._requests.pop(int(self._rng.integers(len(self._requests))))

    def preempt(self) -> None:
        """A request gives up its blocks and gets others; its answer may have gone on."""
        if self._requests:
            self._pick().blocks = self._blocks()

    def change_grammar(self) -> None:
        """All masks are others."""
        self._masks = self._uint32(4)

    def step(self) -> StepInput:
        """A step of some of the requests, in any order, after some tokens of each."""
        rng = self._rng
        count = int(rng.integers(0, len(self._requests) + 1))
        requests = [self._requests[i] for i in rng.permutation(len(self._requests))[:count]]
        for request in requests:
            self._go_on(request)
        sizes = rng.integers(0, 5, count)
        starts = np.concatenate([[0], sizes.cumsum()]).astype(np.int32)
        num_rows = int(starts[-1])
        positions = self._int32(num_rows)
        slots = self._int32(num_rows)
        is_chosen = rng.random(num_rows) < rng.choice([0.5, 1.0])
        logits_rows = np.flatnonzero(is_chosen).astype(np.int32)
        owners = np.searchsorted(starts, logits_rows, side="right") - 1
        self._num_steps += 1
        width = max([0, *(len(request.blocks) for request in requests)])
        tables = np.zeros((count, width), dtype=np.int32)
        for table, request in zip(tables, requests, strict=True):
            table[: len(request.blocks)] = request.blocks
        trees = [
            self._tree(slots[first:end], positions[first:end]) for first, end in pairwise(starts)
        ]
        keys = tuple(request.key for request in requests)
        keys = (keys, keys, (), (0,) * count)[int(rng.integers(4))]
        tasks = tuple(self._task(name, count) for name in "ab"[: rng.integers(3)])
        return StepInput(
            step_id=self._num_steps, moves=self._int32(4).reshape(-1, 2),
            token_ids=self._int32(num_rows), positions=positions, slots=slots,
            request_starts=starts, context_lens=self._int32(count), block_tables=tables,
            trees=tuple(trees), logits_rows=logits_rows,
            sampling=self._sampling(requests, owners, positions[logits_rows]),
            edits=self._edits(requests, owners),
            verification=self._verification() if rng.random() < 0.2 else None,
            log_probs=self._log_probs() if rng.integers(2) else NO_LOG_PROBS,
            probes=self._probes() if rng.integers(2) else NO_PROBES,
            heads=self._heads(tasks if keys else (), count) if rng.integers(2) else NO_HEADS,
            is_traced=bool(rng.integers(2)),
            request_keys=keys, **self._states(count),
        )  # fmt: skip

    def _states(self, count: int) -> dict[str, Int32]:
        """Slots of each request, or none; copies from and to slots of nobody."""
        rng = self._rng
        if rng.random() < 0.3:
            return {}
        slots = rng.permutation(20)[:count].astype(np.int32)
        copies = []
        for others in (20, 40):
            own = slots[rng.random(count) < 0.3]
            copies.append(np.stack([rng.permutation(20)[: len(own)] + others, own], axis=1))
        loads, saves = (pairs.astype(np.int32) for pairs in copies)
        return {"state_slots": slots, "state_loads": loads, "state_saves": saves[:, ::-1]}

    def _probes(self) -> ProbeInput:
        return ProbeInput(self._int32(2), int(self._rng.integers(3)))

    def _log_probs(self) -> LogProbInput:
        rng = self._rng
        return LogProbInput(
            of_targets=bool(rng.integers(2)), num_top=int(rng.integers(3)),
            with_entropies=bool(rng.integers(2)),
            scored_rows=self._int32(1), scored_tokens=self._int32(1),
        )  # fmt: skip

    def _heads(self, tasks: tuple[HeadTask, ...], count: int) -> HeadInput:
        return HeadInput(
            feature_requests=tuple(np.flatnonzero(self._rng.random(count) < 0.3).tolist()),
            chunk_requests=tuple(np.flatnonzero(self._rng.random(count) < 0.3).tolist()),
            tasks=tasks,
            following_tokens=self._int32(count)[:count],
        )

    def _task(self, head: str, num_requests: int) -> HeadTask:
        places = np.flatnonzero(self._rng.random(num_requests) < 0.5).tolist()
        sizes = self._rng.integers(0, 9, len(places)).tolist()
        length_buckets = self._rng.integers(0, EVERY_LENGTH_BUCKET + 1, len(places)).tolist()
        level_tokens = float(self._rng.choice([0.0, 0.7, np.inf]))
        return HeadTask(head, tuple(places), tuple(sizes), tuple(length_buckets), level_tokens)

    def _go_on(self, request: _Request) -> None:
        rng = self._rng
        if rng.random() < 0.5:
            del request.blocks[len(request.blocks) - int(rng.integers(0, 2)) :]
            request.blocks += rng.integers(0, 9, rng.integers(0, 3)).tolist()
        for token in rng.integers(0, 30, rng.integers(0, 3)).tolist():
            if token in request.tokens:
                request.counts[request.tokens.index(token)] += 1
            else:
                request.tokens.append(token)
                request.counts.append(1)

    def _sampling(
        self, requests: list[_Request], owners: np.ndarray, positions: Int32
    ) -> SamplingRows:
        """Of each request alike; now and then any rows, and any positions."""
        rng = self._rng
        rows = np.array([requests[owner].sampling for owner in owners]).reshape(-1, 6).T
        temperature, top_p, min_p, typical_p, top_k, seed = rows
        if rng.random() < 0.2:
            temperature = rng.choice(FLOATS, len(owners))
        behind = positions.astype(np.int64) + 1
        return SamplingRows(
            temperature.astype(np.float32), top_k.astype(np.int32), top_p.astype(np.float32),
            min_p.astype(np.float32), typical_p.astype(np.float32), seed.astype(np.int64),
            behind if rng.random() < 0.8 else rng.integers(-9, 9, len(owners)),
        )  # fmt: skip

    def _edits(self, requests: list[_Request], owners: np.ndarray) -> tuple[LogitEdits, ...]:
        edits = []
        for place, request in enumerate(requests):
            rows = np.flatnonzero(owners == place)
            if len(rows) and (request.has_penalties or request.biases or request.mask_rows >= 0):
                edits.append(self._edit(request, int(rows[0]), len(rows)))
        return tuple(edits)

    def _edit(self, request: _Request, first: int, count: int) -> LogitEdits:
        rng = self._rng
        num_masks = 1 if request.mask_rows == 1 else count
        mask = self._masks[rng.integers(0, 4, num_masks)] if request.mask_rows >= 0 else None
        if mask is not None and rng.random() < 0.3:
            mask[0] = self._uint32(1)
        bias = np.array([*request.biases.values()], dtype=np.float32)
        return LogitEdits(
            first, count, np.array([*request.biases], dtype=np.int32), bias,
            self._penalties(request) if request.has_penalties else None, mask,
        )  # fmt: skip

    def _penalties(self, request: _Request) -> Penalties:
        # Tokens of the tree alone come last, for this step.
        drafted = (100 + self._rng.permutation(5)[: self._rng.integers(0, 3)]).tolist()
        tokens, path = [*request.tokens, *drafted], self._int32(4)
        return Penalties(
            np.array(tokens, dtype=np.int32),
            np.array([*request.counts, *[0] * len(drafted)], dtype=np.int32),
            np.arange(len(tokens)) < request.num_in_prompt,
            path, path[::-1].copy(), *request.factors,
        )  # fmt: skip

    def _tree(self, slots: Int32, positions: Int32) -> TreeRows | None:
        kind = self._rng.integers(4)
        if not kind:
            return None
        if kind == 1:
            # With columns of nodes in flight.
            slots, positions = (np.concatenate([self._int32(2), own]) for own in (slots, positions))
        num_words = -(-len(slots) // 64)
        size = (int(self._rng.integers(0, 4)), num_words)
        bits = self._rng.integers(0, 1 << 63, size, dtype=np.uint64)
        return TreeRows(bits, slots, positions)

    def _verification(self) -> Verification:
        nodes, probs = self._int32(3), self._rng.random((3, 2)).astype(np.float32)
        ids = np.stack([nodes, nodes], axis=1)
        return Verification(
            (TreeCandidates("any", 3, nodes, nodes, nodes, ids, probs),), (1,), (2,)
        )

    def _pick(self) -> _Request:
        return self._requests[int(self._rng.integers(len(self._requests)))]

    def _blocks(self) -> list[int]:
        return self._rng.integers(0, 99, self._rng.integers(0, 40)).tolist()

    def _int32(self, count: int) -> Int32:
        return self._rng.integers(-9, 99, count).astype(np.int32)

    def _uint32(self, count: int) -> np.ndarray:
        return self._rng.integers(0, 3, (count, NUM_WORDS)).astype(np.uint32)
