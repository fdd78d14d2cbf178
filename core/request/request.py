"""One request: what was asked, where its answer stands, and the names of its KV blocks."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..arrays import Int32
from ..errors import DraftlineError
from ..proposals import DraftRequest
from ..tree.streamed_tree import StreamedTree
from ..tree.tree import TokenTree
from .allowed_tokens import AllowedTokens
from .draft_stats import DraftStats, TalliedNodes
from .output import Delta, RequestMetrics, RowAnswer, StepTiming, TokenLogProb
from .sampling_params import RequestOptions, SamplingParams
from .stop import StopRule

FIRST_ROOM = 16


class TokenCounts:
    """Distinct tokens of a text, those of the prompt first, and how often each is in the answer.

    They are kept as arrays, which grow with the text: a step of a long one must not go through all
    of it.

    num_in_prompt  so many of them are in the prompt
    """

    __slots__ = ("_counts", "_index_of", "_tokens", "num_in_prompt")

    def __init__(self, prompt: Iterable[int]) -> None:
        self._index_of = {token: i for i, token in enumerate(dict.fromkeys(prompt))}
        self.num_in_prompt = len(self._index_of)
        self._tokens = np.fromiter(self._index_of, dtype=np.int32, count=self.num_in_prompt)
        self._counts = np.zeros(self.num_in_prompt, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._index_of)

    def append(self, tokens: Iterable[int]) -> None:
        """Count tokens of the answer."""
        for token in tokens:
            index = self._index_of.get(token)
            if index is None:
                self._add(token)
            else:
                self._counts[index] += 1

    def beside(self, tokens: Sequence[int]) -> tuple[Int32, Int32, Int32]:
        """Distinct tokens of the text and of these, int32 [u], and the counts of the text's alone.

        Last comes where each of `tokens` stands among them. New arrays.
        """
        count, others = len(self), dict[int, int]()
        places = []
        for token in tokens:
            index = self._index_of.get(token)
            places.append(others.setdefault(token, count + len(others)) if index is None else index)
        counts = np.zeros(count + len(others), dtype=np.int32)
        counts[:count] = self._counts[:count]
        added = np.fromiter(others, dtype=np.int32, count=len(others))
        distinct = np.concatenate((self._tokens[:count], added))
        return distinct, counts, np.array(places, dtype=np.int32)

    def _add(self, token: int) -> None:
        index = self._index_of[token] = len(self._index_of)
        if index == len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * index + FIRST_ROOM)
            self._counts = np.resize(self._counts, 2 * index + FIRST_ROOM)
        self._tokens[index], self._counts[index] = token, 1

    def copy(self) -> TokenCounts:
        """The same counts, to go on from apart."""
        other = TokenCounts(())
        other.num_in_prompt = self.num_in_prompt
        other._index_of = self._index_of.copy()
        other._tokens, other._counts = self._tokens.copy(), self._counts.copy()
        return other


# Gets every delta of a request in order, or the error that ends it.
Sink = Callable[[Delta | DraftlineError], None]
KEY_BYTES = 16
FIRST_TABLE_LEN = 16
NO_MOVES = np.empty((0, 2), dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A validated request.

    `seed` is the resolved one, `max_tokens` fits the context; without `allowed_tokens` every token
    may be chosen. `keys` of the prompt's blocks, where they were computed with the request: that
    takes milliseconds for a long prompt, which the engine's loop is spared.
    """

    request_id: str
    prompt_ids: Int32
    params: SamplingParams
    seed: int
    max_tokens: int
    sink: Sink
    options: RequestOptions = field(default_factory=RequestOptions)
    allowed_tokens: AllowedTokens | None = None
    keys: PrefixKeys | None = None


class HeadOrder(NamedTuple):
    """A tree of so many nodes at most, after outcomes of these reaches (`core/reach.py`)."""

    max_nodes: int
    reaches: int


@dataclass(slots=True, eq=False)
class RequestState:
    """The only mutable state of a running request.

    float_params   float32 temperature, top_p, min_p and typical_p, and
    whole_params   int64 top_k and seed, as bytes, which a step joins for all its requests
    edits_logits   whether its parameters change logits, so that its rows may need `LogitEdits`
    max_nodes      most nodes of its tree, whatever a step has room for; 0: it takes no drafts
    num_tops       most probable tokens beside log-probabilities of its answer and its prompt; None
                   where no log-probabilities are wanted
    token_ids      committed tokens, prompt included
    order          (priority, number of arrival): who goes first
    key            names it in steps (`StepInput.request_keys`) for as long as it holds its KV
    keys           names of its full blocks; None: it shares none
    blocks         KV blocks, in position order; scratch slots of tree nodes follow the committed;
                   none while it waits
    prefill_len    positions to be cached in chunks: the prompt, or all committed tokens but the
                   last after a preemption
    num_scheduled  of these, how many were cached already or submitted; some may be in flight
    num_charged    prompt tokens up to which its tenant's counter has been charged
    num_shared     of its blocks, how many others may share
    head_orders    what heads of the last stage draft behind its next step, by name
    in_flight      steps of this request that were submitted and not committed yet
    num_losses     steps of it that were lost with a stage since the last that was answered
    moves          int32 [m, 2]  KV copies of the last commits, for this request's next step
    stream         its tree, if that goes through the pipeline in slices; several of its steps may
                   be in flight then
    token_counts   of the text, for penalties; None where there are none
    verified       the tree whose walk is committed next, and its step, of a request that is
                   explained
    nodes          of its trees, by drafter; the engine counts them for all its requests together
    has_ended      it is no request of the engine any more
    prompt_log_probs  of the prompt's tokens as far as they are computed; None if not wanted
    """

    request: Request
    stop: StopRule
    blocks: list[int]
    arrival_time: float
    request_id: str = field(init=False)
    float_params: bytes = field(init=False)
    whole_params: bytes = field(init=False)
    edits_logits: bool = field(init=False)
    max_nodes: int = field(init=False)
    num_tops: tuple[int | None, int | None] = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    prompt_len: int = 0
    order: tuple[int, int] = (0, 0)
    key: int = 0
    keys: PrefixKeys | None = None
    prefill_len: int = 0
    num_scheduled: int = 0
    num_charged: int = 0
    num_shared: int = 0
    in_flight: int = 0
    moves: Int32 = field(default_factory=lambda: NO_MOVES)
    stream: StreamedTree[RowAnswer] | None = None
    token_counts: TokenCounts | None = None
    prompt_log_probs: list[TokenLogProb | None] | None = None
    is_open: bool = False
    wants_features: bool = False
    head_orders: dict[str, HeadOrder] = field(default_factory=dict)
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    num_losses: int = 0
    start_time: float = 0.0
    first_token_time: float = 0.0
    accepted_lengths: list[int] = field(default_factory=list)
    verified: tuple[TokenTree, StepTiming] | None = None
    nodes: TalliedNodes = field(default_factory=lambda: DraftStats().open())
    has_ended: bool = False
    # The blocks' ids as an array with room behind them, and how many of the first are in it.
    _table: Int32 = field(default_factory=lambda: np.empty(FIRST_TABLE_LEN, dtype=np.int32))
    _num_tabled: int = 0

    def __post_init__(self) -> None:
        prompt = self.request.prompt_ids.tolist()
        self.prompt_len = len(prompt)
        request, params = self.request, self.request.params
        self.request_id = request.request_id
        floats = params.temperature, params.top_p, params.min_p, params.typical_p
        self.float_params = np.array(floats, dtype=np.float32).tobytes()
        self.whole_params = np.array((params.top_k, request.seed), dtype=np.int64).tobytes()
        has_rules = request.allowed_tokens is not None or bool(params.logit_bias)
        self.edits_logits = has_rules or params.has_penalties
        options = request.options
        self.token_ids = [*prompt, *options.answered]
        limit = sys.maxsize if options.max_nodes is None else options.max_nodes
        self.max_nodes = limit if options.speculative else 0
        self.num_tops = params.logprobs, params.prompt_logprobs
        if params.has_penalties:
            self.token_counts = TokenCounts(prompt)
            self.token_counts.append(options.answered)
        if params.prompt_logprobs is not None:
            # Nothing comes before the first token that could predict it.
            self.prompt_log_probs = list[TokenLogProb | None]([None] * self.prompt_len)

    @property
    def num_accepted(self) -> int:
        """Nodes that were accepted in its last step; 0 before the first one."""
        return self.accepted_lengths[-1] if self.accepted_lengths else 0

    @property
    def wants_tokens_alone(self) -> bool:
        """Whether nothing is asked of a pass but tokens of unchanged logits."""
        return not self.edits_logits and self.num_tops == (None, None)

    @property
    def num_answered(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.prompt_len

    def last_answered(self, count: int) -> list[int]:
        """The last `count` tokens of the answer, or all of it."""
        return self.token_ids[max(self.prompt_len, len(self.token_ids) - count) :]

    @property
    def has_answer(self) -> bool:
        """Whether a first token is known."""
        return len(self.token_ids) > self.prompt_len

    @property
    def num_prefill_left(self) -> int:
        """Tokens that are to be cached in chunks and that no step has taken yet."""
        return self.prefill_len - self.num_scheduled

    @property
    def is_decoding(self) -> bool:
        """Whether the next step verifies a tree: all before the last token is cached."""
        has_answer = len(self.token_ids) > self.prompt_len
        return has_answer and bool(self.blocks) and self.num_scheduled == self.prefill_len

    def begin(self, key: int, blocks: list[int], num_cached: int) -> None:
        """Take KV blocks, the first of which hold `num_cached` tokens already."""
        self.key = key
        self.blocks = blocks
        self._num_tabled = 0
        self.prefill_len = len(self.token_ids) - self.has_answer
        self.num_scheduled = num_cached
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached

    def take_blocks(self, blocks: Sequence[int]) -> None:
        """Take further KV blocks."""
        self.blocks += blocks

    def drop_blocks(self, count: int) -> list[int]:
        """Give up the last blocks; returns them."""
        dropped = self.blocks[-count:]
        del self.blocks[-count:]
        self._num_tabled = min(self._num_tabled, len(self.blocks))
        return dropped

    def block_table(self) -> Int32:
        """The ids of the blocks, int32 [blocks]; valid until they change."""
        first, count = self._num_tabled, len(self.blocks)
        if first < count:
            if count > len(self._table):
                self._table = np.resize(self._table, 2 * count)
            self._table[first:count] = self.blocks[first:]
            self._num_tabled = count
        return self._table[:count]

    def append(self, tokens: Sequence[int]) -> None:
        """Commit tokens."""
        self.token_ids += tokens
        if self.token_counts is not None:
            self.token_counts.append(tokens)

    def release(self) -> list[int]:
        """Give up the KV, to begin anew later; returns the blocks."""
        blocks, self.blocks = self.blocks, []
        self.moves, self.stream = NO_MOVES, None
        self._num_tabled = 0
        self.num_scheduled = self.prefill_len = self.num_shared = 0
        return blocks

    def draft_request(self) -> DraftRequest:
        """What drafters learn of the request now."""
        params = self.request.params
        return DraftRequest(
            request_id=self.request_id,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            prompt_len=self.prompt_len,
            temperature=params.temperature,
            seed=self.request.seed,
            namespace=self.request.options.namespace,
            logits_params=params,
            end_ids=self.stop.end_ids,
            cache_salt=self.request.options.cache_salt,
            store=self.request.options.store,
        )

    def metrics(self, now: float, acceptance: str) -> RequestMetrics:
        """Counts and times at the request's end; `acceptance` is the engine's."""
        nodes = self.nodes.totals
        return RequestMetrics(
            prompt_tokens=self.prompt_len,
            # One that goes on behind another's tokens may find KV of these, too.
            cached_tokens=min(self.num_cached_tokens or 0, self.prompt_len),
            num_preemptions=self.num_preemptions,
            generated_tokens=self.num_answered,
            num_steps=len(self.accepted_lengths),
            num_draft_tokens=nodes.drafted.total(),
            drafted_by_source=dict(nodes.drafted),
            accepted_by_source=dict(nodes.accepted),
            accepted_lengths=tuple(self.accepted_lengths),
            arrival_time=self.arrival_time,
            start_time=self.start_time,
            first_token_time=self.first_token_time or self.start_time,
            finish_time=now,
            acceptance=acceptance,
        )


class PrefixKeys:
    """The keys of one request's full blocks: a hash chain over its committed tokens.

    A block's key covers its own tokens and all before them, for their KV depends on both, and the
    salt: requests of different salts never share a block, and cannot find out by timing what
    another has sent.
    """

    __slots__ = ("_block_size", "_first", "_keys", "_last")

    def __init__(self, salt: str, block_size: int) -> None:
        self._block_size = block_size
        self._first = self._last = hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES).digest()
        self._keys: list[bytes] = []

    def cut(self, num_tokens: int) -> None:
        """Forget what followed the first tokens, behind which the text reads otherwise now."""
        del self._keys[num_tokens // self._block_size :]
        self._last = self._keys[-1] if self._keys else self._first

    def upto(self, token_ids: Sequence[int] | Int32, num_tokens: int) -> list[bytes]:
        """Keys of the full blocks among the first `num_tokens`; earlier tokens never change."""
        return self.after(0, token_ids, num_tokens)

    def after(
        self, num_blocks: int, token_ids: Sequence[int] | Int32, num_tokens: int
    ) -> list[bytes]:
        """The same without those of the first `num_blocks`."""
        size, count = self._block_size, num_tokens // self._block_size
        known = len(self._keys)
        if known < count:
            # At once: a prompt may have thousands of blocks.
            data = _bytes_of(token_ids[known * size : count * size])
            for start in range(0, len(data), 4 * size):
                block = data[start : start + 4 * size]
                self._last = hashlib.blake2b(self._last + block, digest_size=KEY_BYTES).digest()
                self._keys.append(self._last)
        return self._keys[num_blocks:count]


def _bytes_of(token_ids: Sequence[int] | Int32) -> bytes:
    """The tokens as numbers of 32 bits, in this machine's order: keys never leave it."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype(np.int32, copy=False).tobytes()
    # A third of the time that numpy takes for a list.
    return array("i", token_ids).tobytes()
