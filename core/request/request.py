"""One request: what was asked, and where its answer stands."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..arrays import Int32, Int64
from ..compiled import compiled
from ..errors import DraftlineError
from ..kv_cache import PrefixKeys, RequestKv
from ..pipelined.tree import PipelinedTree
from ..proposals import DraftRequest
from ..tree.tree import SOURCE, TokenTree, TreeBatch
from .allowed_tokens import AllowedTokens
from .output import Delta, RequestMetrics, StepTiming, TokenLogProb
from .sampling_params import RequestOptions, SamplingParams
from .stop import StopRule

# Gets every delta of a request in order, or the error that ends it.
Sink = Callable[[Delta | DraftlineError], None]


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
    """What a head of the last stage drafts behind a request's step.

    max_nodes       of its tree, at most
    length_buckets  after which accepted lengths it does so, bits of buckets (`core/steps.py`)
    """

    max_nodes: int
    length_buckets: int


@dataclass(slots=True, eq=False)
class RequestStats:
    """Times of a request, by the engine's clock, and what it was given.

    num_charged        prompt tokens up to which its tenant's counter has been charged
    num_cached_tokens  whose KV was there when it first started; None before
    accepted_lengths   draft tokens that each of its steps accepted
    nodes              of its trees, by drafter; the engine counts them for all its requests
                       together
    """

    arrival_time: float
    start_time: float = 0.0
    first_token_time: float = 0.0
    num_charged: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    nodes: TalliedNodes = field(default_factory=lambda: DraftStats().open())


class PackedParams(NamedTuple):
    """The parameters of a request in the form in which a step reads them.

    floats          bytes of float32 temperature, top_p, min_p and typical_p
    ints            bytes of int64 top_k and seed; a step joins both for all its requests
    edits_logits    whether they change logits, so that the request's rows may need `LogitEdits`
    num_tops        most probable tokens beside log-probabilities of the answer and of the prompt;
                    None where no log-probabilities are wanted
    """

    floats: bytes
    ints: bytes
    edits_logits: bool
    num_tops: tuple[int | None, int | None]

    @classmethod
    def of(cls, request: Request) -> PackedParams:
        """Those of a request."""
        params = request.params
        floats = params.temperature, params.top_p, params.min_p, params.typical_p
        has_rules = request.allowed_tokens is not None or bool(params.logit_bias)
        return cls(
            np.array(floats, dtype=np.float32).tobytes(),
            np.array((params.top_k, request.seed), dtype=np.int64).tobytes(),
            has_rules or params.has_penalties,
            (params.logprobs, params.prompt_logprobs),
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """The only mutable state of a request, from admission to its last delta.

    max_nodes      most nodes of its tree, whatever a step has room for; 0: it takes no drafts
    token_ids      committed tokens, prompt included
    order          (priority, arrival number): the lower one goes first
    in_flight      steps of this request that were submitted and not committed yet
    num_losses     steps of it that were lost with a stage since the last that finished
    token_counts   of the text, for penalties; None where there are none
    prompt_log_probs  of the prompt's tokens as far as they are computed; None if not wanted
    is_open        whether drafters know it
    wants_features whether its next step hands out hidden states for drafters
    head_orders    what heads of the last stage draft behind its next step, by name
    pipelined      its tree, if that goes through the pipeline in chunks; several of its steps may
                   be in flight then
    to_explain     for `explain`: the tree to be committed next, and its timing
    has_ended      it is no request of the engine any more
    """

    request: Request
    stop: StopRule
    stats: RequestStats
    request_id: str = field(init=False)
    packed: PackedParams = field(init=False)
    max_nodes: int = field(init=False)
    prompt_len: int = field(init=False)
    token_ids: list[int] = field(init=False)
    order: tuple[int, int] = (0, 0)
    kv: RequestKv = field(default_factory=RequestKv)
    in_flight: int = 0
    num_losses: int = 0
    token_counts: TokenCounts | None = None
    prompt_log_probs: list[TokenLogProb | None] | None = None
    is_open: bool = False
    wants_features: bool = False
    head_orders: dict[str, HeadOrder] = field(default_factory=dict)
    pipelined: PipelinedTree | None = None
    to_explain: tuple[TokenTree, StepTiming] | None = None
    has_ended: bool = False

    def __post_init__(self) -> None:
        request, params, options = self.request, self.request.params, self.request.options
        prompt = request.prompt_ids.tolist()
        self.prompt_len = len(prompt)
        self.request_id = request.request_id
        self.packed = PackedParams.of(request)
        self.token_ids = [*prompt, *options.answered]
        limit = sys.maxsize if options.max_nodes is None else options.max_nodes
        self.max_nodes = limit if options.speculative else 0
        if params.has_penalties:
            self.token_counts = TokenCounts(prompt)
            self.token_counts.append(options.answered)
        if params.prompt_logprobs is not None:
            # Nothing comes before the first token that could predict it.
            self.prompt_log_probs = list[TokenLogProb | None]([None] * self.prompt_len)

    @property
    def num_accepted(self) -> int:
        """Nodes that were accepted in its last step; 0 before the first one."""
        return self.stats.accepted_lengths[-1] if self.stats.accepted_lengths else 0

    @property
    def wants_tokens_alone(self) -> bool:
        """Whether nothing is asked of a pass but tokens of unchanged logits."""
        return not self.packed.edits_logits and self.packed.num_tops == (None, None)

    @property
    def max_depth(self) -> int:
        """Deepest useful draft token: one more, the bonus, follows the deepest accepted one."""
        most = self.stop.num_tokens_left - 1
        context = self.request.options.max_context
        return most if context is None else max(min(most, context - len(self.token_ids)), 0)

    @property
    def num_in_place(self) -> int:
        """Tokens whose KV is where it belongs once the steps so far have run."""
        return len(self.token_ids) - 1 if self.pipelined is None else self.pipelined.num_in_place

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
    def is_decoding(self) -> bool:
        """Whether the next step verifies a tree: all before the last token is cached."""
        has_answer = len(self.token_ids) > self.prompt_len
        return has_answer and bool(self.kv.blocks) and not self.kv.num_prefill_left

    def begin(self, key: int, blocks: list[int], num_cached: int) -> None:
        """Take KV blocks, the first of which hold `num_cached` tokens already."""
        self.kv.begin(key, blocks, num_cached, len(self.token_ids) - self.has_answer)
        if self.stats.num_cached_tokens is None:
            self.stats.num_cached_tokens = num_cached

    def append(self, tokens: Sequence[int]) -> None:
        """Commit tokens."""
        self.token_ids += tokens
        if self.token_counts is not None:
            self.token_counts.append(tokens)

    def advance_grammar(self, tokens: Sequence[int]) -> None:
        """The rules about its tokens follow committed ones, behind which the answer goes on."""
        if self.request.allowed_tokens is not None:
            self.request.allowed_tokens.advance(tokens)

    def move_kv(self, moves: Int32) -> None:
        """Have the next step bring the KV of accepted nodes to where it belongs.

        A request that was preempted meanwhile has none; for pipelined trees `read_chunk` did this.
        """
        if self.kv.blocks and self.pipelined is None:
            self.kv.moves = moves

    def release(self) -> list[int]:
        """Give up the KV, to compute it again later; returns the blocks."""
        self.pipelined = None
        return self.kv.release()

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
        stats, nodes = self.stats, self.stats.nodes.totals
        return RequestMetrics(
            prompt_tokens=self.prompt_len,
            # One that goes on behind another's tokens may find KV of these, too.
            cached_tokens=min(stats.num_cached_tokens or 0, self.prompt_len),
            num_preemptions=stats.num_preemptions,
            generated_tokens=self.num_answered,
            num_steps=len(stats.accepted_lengths),
            num_draft_tokens=nodes.drafted.total(),
            drafted_by_source=dict(nodes.drafted),
            accepted_by_source=dict(nodes.accepted),
            accepted_lengths=tuple(stats.accepted_lengths),
            arrival_time=stats.arrival_time,
            start_time=stats.start_time,
            first_token_time=stats.first_token_time or stats.start_time,
            finish_time=now,
            acceptance=acceptance,
        )


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
        indices = []
        for token in tokens:
            index = self._index_of.get(token)
            indices.append(
                others.setdefault(token, count + len(others)) if index is None else index
            )
        counts = np.zeros(count + len(others), dtype=np.int32)
        counts[:count] = self._counts[:count]
        added = np.fromiter(others, dtype=np.int32, count=len(others))
        distinct = np.concatenate((self._tokens[:count], added))
        return distinct, counts, np.array(indices, dtype=np.int32)

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


FIRST_ROWS = 64


class NodeTotals(NamedTuple):
    """Nodes by the drafter that proposed them first; none of drafters without any."""

    drafted: Counter[str]
    accepted: Counter[str]

    @property
    def wasted(self) -> Counter[str]:
        """Nodes that were verified and not committed."""
        return self.drafted - self.accepted


class DraftStats:
    """Nodes of each drafter that were verified and committed, for all requests of an engine.

    Arrays by request and drafter, since every step adds to those of all its requests. Each request
    has a row until it ends.
    """

    __slots__ = ("_counts", "_free", "_names")

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        # Drafted and accepted nodes. Row 0 takes what still comes of requests that have ended.
        self._counts = np.zeros((2, 1, 0), dtype=np.int64)
        self._free: list[int] = []

    def open(self) -> TalliedNodes:
        """The nodes of a new request."""
        if not self._free:
            old = self._counts.shape[1]
            new = max(FIRST_ROWS, 2 * old)
            self._grow(new, self._counts.shape[2])
            self._free = list(range(new - 1, old - 1, -1))
        row = self._free.pop()
        self._counts[:, row] = 0
        return TalliedNodes(self, row)

    def close(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)

    def add(
        self, rows: Sequence[int], trees: TreeBatch, sources: Int32, source_ends: Int64
    ) -> None:
        """Count a step: its trees, and the sources of what was committed of each.

        The trees' drafters are those known already and others behind them, or the first of these.
        Sources are int32, below 0 for what is no node's; `source_ends` is int64 [trees].
        """
        if len(trees.names) > len(self._names):
            self._names = trees.names
            self._grow(self._counts.shape[1], len(self._names))
        row_ids = np.array(rows, dtype=np.int64)
        add_nodes(self._counts, row_ids, trees.nodes, trees.node_ends, sources, source_ends)

    def take_back(self, row: int, sources: Iterable[str]) -> None:
        """Nodes that were accepted stand behind the answer's end."""
        for source in sources:
            self._counts[1, row, self._names.index(source)] -= 1

    def totals(self, row: int) -> NodeTotals:
        """What was counted for a request."""
        drafted, accepted = (
            Counter({name: count for name, count in zip(self._names, counts, strict=True) if count})
            for counts in self._counts[:, row].tolist()
        )
        return NodeTotals(drafted, accepted)

    def _grow(self, num_rows: int, num_names: int) -> None:
        counts = np.zeros((2, num_rows, num_names), dtype=np.int64)
        counts[:, : self._counts.shape[1], : self._counts.shape[2]] = self._counts
        self._counts = counts


@compiled
def add_nodes(
    counts: Int64,
    rows: Int64,
    nodes: Int32,
    node_ends: Int64,
    sources: Int32,
    source_ends: Int64,
) -> None:
    """Count the nodes of each tree, and those on its path; see `DraftStats.add`."""
    node, token = 0, 0
    for tree in range(len(rows)):
        while node < node_ends[tree]:
            counts[0, rows[tree], nodes[node, SOURCE]] += 1
            node += 1
        while token < source_ends[tree]:
            if sources[token] >= 0:
                counts[1, rows[tree], sources[token]] += 1
            token += 1


class TalliedNodes:
    """The nodes of one request: a row of the stats, and after its end what stood there."""

    __slots__ = ("_final", "_stats", "row")

    def __init__(self, stats: DraftStats, row: int) -> None:
        self.row = row
        self._stats = stats
        self._final: NodeTotals | None = None

    @property
    def totals(self) -> NodeTotals:
        """What was counted."""
        return self._stats.totals(self.row) if self._final is None else self._final

    def take_back(self, sources: Iterable[str]) -> None:
        """Nodes that were accepted stand behind the answer's end."""
        self._stats.take_back(self.row, sources)

    def close(self) -> None:
        """The request has ended: what comes after is not counted."""
        self._final = self.totals
        self._stats.close(self.row)
        self.row = 0
