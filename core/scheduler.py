"""Who runs, and what each step holds: admission by KV blocks, trees first, then prompt chunks."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

from .errors import CapacityError, RequestError
from .fair_share import FairShare
from .kv_cache import BlockPool, PrefixKeys
from .request.request import RequestState
from .state_slots import NO_SLOT, StateSlots
from .step.parts import PromptChunk

# A prompt that fills more steps is long.
LONG_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a replica.

    max_running     requests that hold KV at once
    max_waiting     requests in the queue beyond those that may run
    max_step_rows   rows of a step, tree nodes and prompt tokens together
    max_tree_nodes  nodes of one request's tree
    max_probe_rows  rows that one request's drafters may probe with in a step
    num_groups      steps in flight that the requests are spread over: one a pipeline stage, and one
                    that waits for the first of them
    share_prefixes  whether requests share the KV of equal prefixes
    keeps_states    whether layers keep a state of each running request
    num_snapshots   of states, for requests that begin alike
    """

    max_running: int
    max_waiting: int
    max_step_rows: int
    max_tree_nodes: int
    max_probe_rows: int
    num_groups: int
    share_prefixes: bool = True
    keeps_states: bool = False
    num_snapshots: int = 0


class Scheduler:
    """Owns the queue, the running requests and their KV blocks.

    Requests go in the order of priority and arrival, and between tenants by what each has had
    (`fair_share.py`). A request takes the blocks of its prompt when it starts and further ones as
    its answer grows; where none are left, the last in order gives up its KV, waits and computes it
    again. The first in order always gets on, so all end.
    """

    __slots__ = (
        "_limits", "_num_added", "_num_begun", "_pool", "_prefill_share", "_prefilling",
        "_states", "fair", "num_preemptions", "num_prefix_hits", "num_prefix_queries", "running",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, pool: BlockPool, limits: SchedulerLimits, prefill_share: PrefillShare | None = None
    ) -> None:
        """`prefill_share`: of a step's time; without it, prompts take all rows that trees leave."""
        self._pool = pool
        self._prefill_share = prefill_share
        self._limits = limits
        self._num_added = self._num_begun = 0
        num_states = limits.max_running if limits.keeps_states else 0
        self._states = StateSlots(num_states, limits.num_snapshots)
        self.fair = FairShare()
        self.num_preemptions = 0
        # Prompt tokens that were looked for in shared blocks, and found there.
        self.num_prefix_queries = self.num_prefix_hits = 0
        # Those that run and have tokens left to be cached in chunks.
        self._prefilling: dict[str, RequestState] = {}
        self.waiting: list[RequestState] = []
        self.running: dict[str, RequestState] = {}

    @property
    def block_size(self) -> int:
        """KV slots of a block."""
        return self._pool.block_size

    @property
    def num_slots(self) -> int:
        """KV slots of the whole cache: most tokens of one request."""
        return self._pool.num_blocks * self._pool.block_size

    @property
    def max_probe_rows(self) -> int:
        """Rows that one request's drafters may probe with in a step."""
        return self._limits.max_probe_rows

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that is held, 0 to 1."""
        return self._pool.usage

    def add(self, state: RequestState) -> None:
        """Queue a request.

        Raises `RequestError` for one that can never fit, `CapacityError` when the queue is full.
        """
        slots = state.prompt_len + state.request.max_tokens
        if slots > self.num_slots:
            raise RequestError(
                "max_tokens",
                f"{state.request.max_tokens} and the prompt's {state.prompt_len} tokens exceed the "
                f"KV cache of {self.num_slots} (kv_cache_tokens of the server)",
            )
        most = self._limits.max_running + self._limits.max_waiting
        num_all = len(self.running) + len(self.waiting)
        if num_all >= most and not self.fair.may_queue_beyond(state, most):
            raise CapacityError(f"{len(self.waiting)} requests are waiting; try again later")
        options = state.request.options
        state.order = (options.priority, self._num_added)
        self._num_added += 1
        # A prompt whose log-probabilities are wanted is computed anew.
        if self._limits.share_prefixes and state.prompt_log_probs is None:
            state.kv.prefix_keys = state.request.keys or PrefixKeys(
                options.salt, self._pool.block_size
            )
        self.fair.enter(state)
        self._queue(state)

    def admit(self) -> list[RequestState]:
        """Start waiting requests, in order, while blocks for what they are to cache are free."""
        admitted = []
        while self.waiting and self._begin(state := self.fair.first(self.waiting)):
            self.waiting.remove(state)
            self.running[state.request_id] = state
            self.fair.start(state)
            if state.kv.num_prefill_left:
                self._prefilling[state.request_id] = state
            admitted.append(state)
            # What a preempted request finds again are its own blocks.
            if state.kv.prefix_keys is not None and not state.stats.num_preemptions:
                self.num_prefix_queries += len(state.token_ids)
                self.num_prefix_hits += state.stats.num_cached_tokens or 0
        return admitted

    def remove(self, state: RequestState) -> None:
        """Forget a request wherever it stands, and free its blocks.

        Safe while its steps are in flight: stages run steps in order, so a later owner of the
        blocks writes them after every row of this request did, and reads only what it wrote.
        """
        if self.running.pop(state.request_id, None) is None:
            self.waiting.remove(state)
        else:
            self.fair.stop(state)
        self.fair.leave(state)
        self._prefilling.pop(state.request_id, None)
        self._release(state)

    @property
    def num_groups(self) -> int:
        """Steps in flight that requests are spread over."""
        return self._limits.num_groups

    @property
    def num_flights_each(self) -> int:
        """Steps of each request that would keep all of these in flight; 1 where others do."""
        return max(1, self._limits.num_groups // max(1, len(self.running)))

    def decoding(
        self,
        late: Collection[str] = (),
        may_follow: Callable[[RequestState], bool] = lambda _state: False,
    ) -> list[RequestState]:
        """Requests whose next tree may go out now: one group, so that others can fill stages.

        late        requests that cannot take part
        may_follow  whether one may that has steps in flight; those that have none go first
        """
        group_len = -(-len(self.running) // self._limits.num_groups)
        running = self.fair.in_order(self.running.values())
        decoding = [state for state in running if state.is_decoding]
        ready = [state for state in decoding if not state.in_flight]
        if len(ready) < group_len:
            behind = [state for state in decoding if state.in_flight and may_follow(state)]
            ready += sorted(behind, key=attrgetter("in_flight"))
        if late:
            ready = [state for state in ready if state.request_id not in late]
        return ready[:group_len]

    def nodes_each(self, num_decoding: int) -> int:
        """Tree nodes that each of the step's decoding requests may have.

        At most half of the step when prompts wait, so that trees never starve them.
        """
        rows = self._limits.max_step_rows // (2 if self._prefilling else 1)
        return max(0, min(self._limits.max_tree_nodes, rows // max(num_decoding, 1) - 1))

    @property
    def is_prefilling(self) -> bool:
        """Whether a request that runs has tokens left to be cached in chunks."""
        return bool(self._prefilling)

    def rows_in_blocks(self, states: Sequence[RequestState]) -> int:
        """Rows, the last committed token's the first, that the blocks of each have slots for."""
        size = self._pool.block_size
        rows = (len(state.kv.blocks) * size - len(state.token_ids) + 1 for state in states)
        return min(rows, default=1)

    def num_prefill_rows(self, num_decoding: int) -> int:
        """Prompt rows that will go into a step beside so many roots."""
        room = max(0, self._limits.max_step_rows - num_decoding)
        short = long = 0
        for state in self._prefilling.values():
            if self._is_long(state):
                long += state.kv.num_prefill_left
            else:
                short += state.kv.num_prefill_left
        return min(room, short + min(long, self._long_room(num_decoding, room)))

    def reserve(self, state: RequestState, num_slots: int) -> bool:
        """Give a request exactly the blocks of this many slots; False if too few are free."""
        missing = -(-num_slots // self._pool.block_size) - len(state.kv.blocks)
        if not missing:
            return True
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            state.kv.take_blocks(self._pool.allocate(missing))
        else:
            # Scratch of an earlier tree. KV that is still to be moved out of it goes first in the
            # step that this is for.
            self._pool.free(state.kv.drop_blocks(-missing))
        return True

    def missing_blocks(self, states: Sequence[RequestState], num_slots: Sequence[int]) -> list[int]:
        """Blocks that each lacks for so many slots, below 0 where it has too many.

        Of all at once, since most of a step's requests lack none.
        """
        size = self._pool.block_size
        slots = zip(states, num_slots, strict=True)
        return [-(-count // size) - len(state.kv.blocks) for state, count in slots]

    def make_room(self, state: RequestState, num_slots: int) -> bool:
        """`reserve`, taking the KV of requests that are later in order, or failing that its own.

        Whoever is earlier keeps its blocks, so a step that is planned in order stays valid.
        """
        while not self.reserve(state, num_slots):
            victim = self.fair.in_order(self.running.values())[-1]
            self.preempt(victim)
            if victim is state:
                return False
        return True

    def prompt_chunks(self, num_tree_rows: int) -> list[PromptChunk]:
        """Fill the rows that trees leave to prompts, in order; counts them as scheduled."""
        if not self._prefilling:
            return []
        left = max(0, self._limits.max_step_rows - num_tree_rows)
        long_left = self._long_room(num_tree_rows, left)
        chunks = []
        for state in self.fair.in_turn(self._prefilling.values()):
            is_long = self._is_long(state)
            size = min(left, long_left if is_long else left, state.kv.num_prefill_left)
            if size > 0:
                kv = state.kv
                start, end = kv.num_scheduled, kv.num_scheduled + size
                end = min((cut for cut in kv.cuts if start < cut < end), default=end)
                size = end - start
                kv.num_scheduled = end
                self.fair.charge_prompt(state, start, end)
                if not kv.num_prefill_left:
                    del self._prefilling[state.request_id]
                wants_token = end == kv.prefill_len and not state.has_answer
                states = self._chunk_states(state, end)
                chunks.append(PromptChunk(state, start, end, wants_token, *states))
                left -= size
                long_left -= size if is_long else 0
        return chunks

    def _is_long(self, state: RequestState) -> bool:
        """Whether what it is to cache fills so many steps that it holds others up for long."""
        return state.kv.prefill_len > LONG_STEPS * self._limits.max_step_rows

    def _long_room(self, num_tree_rows: int, room: int) -> int:
        """Rows that long prompts may take of `room`."""
        if self._prefill_share is None:
            return room
        num_long = sum(map(self._is_long, self._prefilling.values()))
        if not num_long:
            return room
        return self._prefill_share.max_rows(
            num_tree_rows,
            room,
            num_prompts=num_long,
            num_answering=sum(state.has_answer for state in self.running.values()),
        )

    def note_step(
        self, num_rows: int, chunks: Sequence[PromptChunk], seconds: float, num_in_flight: int
    ) -> None:
        """Learn what a step of so many rows took; see `PrefillShare.note_step`."""
        if self._prefill_share is not None and all(self._is_long(chunk.state) for chunk in chunks):
            num_prompt_rows = sum(chunk.num_rows for chunk in chunks)
            self._prefill_share.note_step(
                num_rows - num_prompt_rows, num_prompt_rows, seconds, num_in_flight
            )

    def share(self, state: RequestState, num_tokens: int) -> None:
        """Let others share the KV of a request's first `num_tokens` tokens, which is final."""
        kv = state.kv
        if kv.prefix_keys is None or not kv.blocks:
            return
        if num_tokens // self._pool.block_size <= kv.num_shared:
            return
        for key in kv.prefix_keys.after(kv.num_shared, state.token_ids, num_tokens):
            self._pool.register(kv.blocks[kv.num_shared], key)
            kv.num_shared += 1

    def set_apart(self, state: RequestState) -> None:
        """Share no KV with a request any more: what it has computed may be wrong, and so may what
        it had of others. It takes no drafts from now on."""
        if state.kv.prefix_keys is not None:
            keys = state.kv.prefix_keys.upto(state.token_ids, len(state.token_ids))
            self._pool.unregister(keys)
            self._states.forget(keys)
        state.kv.prefix_keys, state.max_nodes = None, 0

    def preempt(self, state: RequestState) -> None:
        """Take the KV of a request that runs: it waits, and computes all of it again."""
        del self.running[state.request_id]
        self.fair.stop(state)
        self._prefilling.pop(state.request_id, None)
        self._release(state)
        state.stats.num_preemptions += 1
        self.num_preemptions += 1
        self._queue(state)

    def forget_kv(self) -> None:
        """All KV is lost: the requests that ran wait, and compute it again."""
        for state in list(self.running.values()):
            self.preempt(state)
        self._pool.forget_keys()
        self._states.forget_snapshots()

    def _begin(self, state: RequestState) -> bool:
        """Give a waiting request its blocks, if it may start."""
        # The output of a step that was in flight when it was preempted changes what it caches.
        if state.in_flight:
            return False
        num_tokens = len(state.token_ids)
        # The last token is always computed: its logits are wanted.
        names = state.kv.prefix_keys
        keys = names.upto(state.token_ids, num_tokens - 1) if names else []
        num_shared, num_idle = self._pool.num_shared(keys)
        num_known = num_shared
        if self._is_computed_now(keys[num_known : num_known + 1]):
            return False
        if self._states.keeps_states:
            longest = self._states.longest(keys[:num_known])
            num_shared, num_idle = self._pool.num_shared(keys[:longest])
        missing = self._pool.blocks_for(num_tokens) - num_shared
        # One block for each that runs, or the newcomer would soon be preempted by them.
        lacks_blocks = missing + len(self.running) > self._pool.num_free - num_idle
        if lacks_blocks or len(self.running) >= self._limits.max_running:
            victim = self.fair.victim(state, self.running.values())
            if victim is None:
                return False
            self.preempt(victim)
            return self._begin(state)
        blocks = self._pool.share(keys[:num_shared]) + self._pool.allocate(missing)
        self._num_begun += 1
        state.begin(self._num_begun, blocks, num_shared * self._pool.block_size)
        state.kv.num_shared = num_shared
        self._begin_states(state, keys, num_shared, num_known)
        return True

    def _release(self, state: RequestState) -> None:
        """Take back its blocks and its slot of states, if it holds any."""
        self._states.give_back(state.kv.state_slot)
        if state.kv.snapshot != NO_SLOT:
            self._states.unpin(state.kv.snapshot)
        self._pool.free(state.release())

    def _begin_states(
        self, state: RequestState, keys: Sequence[bytes], num_shared: int, num_known: int
    ) -> None:
        """Give a request that starts its slot of states, and choose where it makes snapshots.

        keys        of its prompt's full blocks
        num_shared  of these, behind which it goes on from a snapshot
        num_known   of these, that others have had: where texts part, more may
        """
        if not self._states.keeps_states:
            return
        state.kv.state_slot = self._states.take()
        if num_shared:
            state.kv.snapshot = self._states.pin(keys[num_shared - 1])
        size = self._pool.block_size
        state.kv.cuts = tuple(
            count * size for count in {num_known, len(keys)} if count > num_shared
        )

    def _chunk_states(self, state: RequestState, end: int) -> tuple[int, int]:
        """`snapshot` and `saved_to` of a request's chunk that ends there."""
        kv, saved_to = state.kv, NO_SLOT
        snapshot, kv.snapshot = kv.snapshot, NO_SLOT
        if snapshot != NO_SLOT:
            self._states.unpin(snapshot)
        if end in kv.cuts and kv.prefix_keys is not None:
            saved_to = self._states.reserve(kv.prefix_keys.upto(state.token_ids, end)[-1])
        return snapshot, saved_to

    def note_saved(self, chunk: PromptChunk) -> None:
        """The step of a chunk has finished: others may go on from the states behind it."""
        keys = chunk.state.kv.prefix_keys
        if chunk.saved_to != NO_SLOT and keys is not None:
            key = keys.upto(chunk.state.token_ids, chunk.end)[-1]
            self._states.note_filled(key, chunk.saved_to)

    def _is_computed_now(self, keys: list[bytes]) -> bool:
        """Whether a running request will soon have the KV of these blocks of a prompt to share."""
        if not keys:
            return False
        for state in self.running.values():
            kv = state.kv
            if kv.prefix_keys is not None and (kv.num_prefill_left or state.in_flight):
                others = kv.prefix_keys.upto(state.token_ids, kv.prefill_len)
                if keys[0] in others[kv.num_shared :]:
                    return True
        return False

    def _queue(self, state: RequestState) -> None:
        insort(self.waiting, state, key=lambda waiting: waiting.order)


# Weight of the newest step in what steps of trees take.
WEIGHT = 0.1
# And of the newest step with prompts in whether these keep to their share.
PROMPT_WEIGHT = 0.25
# How much of an error is mended at once: several steps are under way before one finishes.
GAIN = 0.15
# A prompt's row takes at most so many times what a row of a tree takes, and at least half of it.
DEAREST, CHEAPEST = 256.0, 0.5
# So many are always taken: prompts get on, whatever they take.
LEAST_ROWS = 8


class PrefillShare:
    """Bounds the share of a stage's time that goes to long prompts while answers are generated.

    A long prompt is cached in chunks beside them (chunked prefill, Sarathi-Serve, arXiv 2403.02310,
    section 4.2). Its rows are bounded by time and not by number: a row of a long prompt takes more
    time the further it stands in the prompt, and a row costs less beside many answers than one.
    """

    __slots__ = (
        "_allowed_s", "_num_stages", "_scale", "_seconds", "_share", "_share_now", "_taken_s",
        "_tree_rows", "_tree_s",
    )  # fmt: skip

    def __init__(self, share: float, seconds: Callable[[int], float], num_stages: int = 1) -> None:
        """What it goes by.

        share    of a stage's time, above 0; 1: no bound
        seconds  that a step of so many rows is expected to take, for the ratio of two such times
        """
        self._share = share
        self._seconds = seconds
        self._num_stages = num_stages
        # Rows of steps without prompts, and what a stage takes for one; 0 before it is known.
        self._tree_rows = 1.0
        self._tree_s = 0.0
        # Rows that prompts may have, as a part of those that they could if theirs cost what rows
        # of trees do.
        self._scale = 1.0
        self._share_now = share
        # Decayed sums over steps with prompts: what they took of a stage, and what they might.
        self._taken_s = self._allowed_s = 0.0

    def max_rows(
        self, num_tree_rows: int, room: int, *, num_prompts: int, num_answering: int
    ) -> int:
        """Most prompt rows of a step beside so many rows of trees, at most `room`.

        Long prompts, which fill several steps: short ones are best computed together, so that
        answers are generated in larger batches. Where many wait beside few answers, their share
        grows with their number. A step without trees counts as one with as many as steps have.

        num_prompts    requests whose long prompts are to be cached
        num_answering  requests that are generating their answers
        """
        if not num_answering or room <= 0:
            return max(room, 0)
        self._share_now = max(self._share, (num_prompts - 1) / (num_prompts + num_answering))
        tree_rows = num_tree_rows or round(self._tree_rows)
        # Measured with one step at a time, that is of all stages: too much rather than too little.
        row_s = (self._seconds(tree_rows + room) - self._seconds(tree_rows)) / room
        if self._share_now >= 1.0 or row_s <= 0:
            return room
        prompts_s = self._stage_s(tree_rows) * self._share_now / (1.0 - self._share_now)
        rows = self._scale * prompts_s / row_s
        return min(room, max(LEAST_ROWS, int(rows)))

    def note_step(
        self, num_tree_rows: int, num_prompt_rows: int, seconds: float, num_in_flight: int = 1
    ) -> None:
        """Learn from a finished step.

        seconds        since it was sent, or the step before it finished
        num_in_flight  steps that were under way, with this one: of as many as there are stages,
                       each finishes when a stage has done it; one alone, when all have
        """
        stage_s = seconds * min(num_in_flight, self._num_stages) / self._num_stages
        if not num_prompt_rows:
            weight = WEIGHT if self._tree_s else 1.0
            self._tree_rows += weight * (num_tree_rows - self._tree_rows)
            self._tree_s += weight * (stage_s - self._tree_s)
        elif self._share_now < 1.0:
            tree_s = self._stage_s(num_tree_rows or round(self._tree_rows))
            self._taken_s += stage_s - PROMPT_WEIGHT * self._taken_s
            self._allowed_s += tree_s / (1.0 - self._share_now) - PROMPT_WEIGHT * self._allowed_s
            if self._taken_s > 0:
                scale = self._scale * (self._allowed_s / self._taken_s) ** GAIN
                self._scale = min(max(scale, 1 / DEAREST), self._num_stages / CHEAPEST)

    def _stage_s(self, num_tree_rows: int) -> float:
        """What a stage takes for a step of trees."""
        if not self._tree_s:
            return self._seconds(num_tree_rows) / self._num_stages
        ratio = self._seconds(num_tree_rows) / self._seconds(max(1, round(self._tree_rows)))
        return self._tree_s * ratio
