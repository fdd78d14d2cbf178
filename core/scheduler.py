"""Who runs, and what each step holds: admission by KV blocks, trees first, then prompt chunks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .block_pool import BlockPool
from .errors import CapacityError
from .request import RequestState
from .step_builder import PromptChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a replica.

    max_running     requests that hold KV at once
    max_waiting     requests in the queue beyond those that may run
    max_step_rows   rows of a step, tree nodes and prompt tokens together
    max_tree_nodes  nodes of one request's tree
    max_probe_rows  rows that one request's drafters may probe with in a step
    num_groups      steps in flight that the requests are spread over, one a pipeline stage
    """

    max_running: int
    max_waiting: int
    max_step_rows: int
    max_tree_nodes: int
    max_probe_rows: int
    num_groups: int


class Scheduler:
    """Owns the queue, the running requests and their KV blocks."""

    __slots__ = ("_limits", "_pool", "running", "waiting")

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self._pool = pool
        self._limits = limits
        self.waiting: deque[RequestState] = deque()
        self.running: dict[str, RequestState] = {}

    def add(self, state: RequestState) -> None:
        """Queue a request. Raises `CapacityError` when the queue is full or it can never fit."""
        if self._blocks_needed(state) > self._pool.num_blocks:
            raise CapacityError(
                f"the request needs {self._slots_needed(state)} KV slots, the engine has "
                f"{self._pool.num_blocks * self._pool.block_size}; lower max_tokens or raise "
                "kv_cache_tokens"
            )
        most = self._limits.max_running + self._limits.max_waiting
        if len(self.running) + len(self.waiting) >= most:
            raise CapacityError(f"{len(self.waiting)} requests are waiting; try again later")
        self.waiting.append(state)

    def admit(self) -> list[RequestState]:
        """Start waiting requests, in order, while blocks for their longest answer are free."""
        admitted = []
        while self.waiting and self._fits(self.waiting[0]):
            state = self.waiting.popleft()
            state.blocks = self._pool.allocate(self._blocks_needed(state))
            self.running[state.request_id] = state
            admitted.append(state)
        return admitted

    def remove(self, state: RequestState) -> None:
        """Forget a request wherever it stands, and free its blocks.

        Safe while its steps are in flight: stages run steps in order, so a later owner of the
        blocks writes them after every row of this request did, and reads only what it wrote.
        """
        if self.running.pop(state.request_id, None) is None:
            self.waiting.remove(state)
        self._pool.free(state.blocks)
        state.blocks = []

    def decoding(self) -> list[RequestState]:
        """Requests whose next tree may go out now: one group, so that others can fill stages."""
        group_len = -(-len(self.running) // self._limits.num_groups)
        ready = [s for s in self.running.values() if s.is_decoding and not s.in_flight]
        return ready[:group_len]

    def nodes_each(self, num_decoding: int) -> int:
        """Tree nodes that each of the step's decoding requests may have.

        At most half of the step when prompts wait, so that trees never starve them.
        """
        prompts_wait = any(s.num_prompt_left for s in self.running.values())
        rows = self._limits.max_step_rows // (2 if prompts_wait else 1)
        return max(0, min(self._limits.max_tree_nodes, rows // max(num_decoding, 1) - 1))

    def prompt_chunks(self, num_tree_rows: int) -> list[PromptChunk]:
        """Fill the rows that trees leave with the oldest prompts; counts them as scheduled."""
        left = self._limits.max_step_rows - num_tree_rows
        chunks = []
        for state in self.running.values():
            size = min(left, state.num_prompt_left)
            if size > 0:
                start = state.num_scheduled
                state.num_scheduled += size
                chunks.append(PromptChunk(state, start, start + size))
                left -= size
        return chunks

    @property
    def max_probe_rows(self) -> int:
        """Rows that one request's drafters may probe with in a step."""
        return self._limits.max_probe_rows

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that is held, 0 to 1."""
        return self._pool.usage

    def _fits(self, state: RequestState) -> bool:
        free_place = len(self.running) < self._limits.max_running
        return free_place and self._blocks_needed(state) <= self._pool.num_free

    def _blocks_needed(self, state: RequestState) -> int:
        return self._pool.blocks_for(self._slots_needed(state))

    def _slots_needed(self, state: RequestState) -> int:
        request = state.request
        scratch = self._limits.max_tree_nodes + self._limits.max_probe_rows
        speculative = scratch if request.speculative else 0
        return state.prompt_len + request.max_tokens + speculative
