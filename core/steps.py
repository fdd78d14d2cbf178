"""Between the engine and a pipeline: a step as arrays, and what comes back of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple, overload

import numpy as np

from .arrays import Bool, Float32, Int32, Int64, Span, UInt32, UInt64
from .proposals import Proposal

# Columns of a tree's mask in one word of its bits.
WORD_BITS = 64
NO_ROWS = np.empty(0, dtype=np.int32)
NO_PAIRS = np.empty((0, 2), dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """Sampling parameters of the rows that get a target token; all arrays [rows].

    temperature float32 (0 is greedy), top_k int32 (0 is off), top_p float32 (1 is off),
    min_p float32 (0 is off), typical_p float32 (1 is off), seed int64, position int64 (absolute,
    of the token being chosen)
    """

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    typical_p: Float32
    seed: Int64
    position: Int64

    @property
    def is_unfiltered(self) -> bool:
        """Whether all rows keep every token."""
        cuts = self.top_k.any() or self.min_p.any()
        return not cuts and bool((self.top_p >= 1).all() and (self.typical_p >= 1).all())

    @classmethod
    def unfiltered(cls, temperature: Float32, seed: Int64, position: Int64) -> SamplingRows:
        """Rows that keep every token."""
        zeros = np.zeros(len(position), dtype=np.float32)
        none = np.zeros(len(position), dtype=np.int32)
        return cls(temperature, none, zeros + 1, zeros, zeros + 1, seed, position)

    @classmethod
    def greedy(cls, position: Int64) -> SamplingRows:
        """Rows that take the most probable token."""
        zeros = np.zeros(len(position), dtype=np.float32)
        return cls.unfiltered(zeros, np.zeros(len(position), dtype=np.int64), position)


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """What makes tokens of a text less likely to come again, for the rows of one request.

    tokens      int32 [u]     distinct tokens: of the text so far and of the rows' own paths
    counts      int32 [u]     times in the answer so far, without the paths
    in_prompt   bool [u]      whether the prompt holds it
    path_rows   int32 [p]     row, and
    path_tokens int32 [p]     index into `tokens`, of each token on a row's path
    repetition  divides positive logits of tokens of the text, multiplies negative ones; 1 is off
    presence    subtracted once for tokens of the answer
    frequency   subtracted for each time in the answer
    """

    tokens: Int32
    counts: Int32
    in_prompt: Bool
    path_rows: Int32
    path_tokens: Int32
    repetition: float
    presence: float
    frequency: float


@dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """Changes to the logits of one request's rows, made in the order of the fields.

    first_row, num_rows  which of the step's `logits_rows`
    bias_tokens  int32 [b]    tokens whose logits get
    bias         float32 [b]  this added
    penalties    None: none
    mask         uint32 [1 or num_rows, words]  a bit for each token, lowest first: whether it may
                 be chosen; None: all may
    """

    first_row: int
    num_rows: int
    bias_tokens: Int32
    bias: Float32
    penalties: Penalties | None
    mask: UInt32 | None


class TreeRows(NamedTuple):
    """What the rows of one request see besides the committed context.

    ancestors  uint64 [rows of the request, words]  a bit a column (`core/tree/tree.py`)
    slots      int32 [columns]  KV slot of each column
    positions  int32 [columns]  absolute position of each column

    The request's own rows are the last columns, in row order. Columns before them are nodes of
    earlier steps that are still in flight, so that a tree can be pipelined through the pipeline.
    """

    ancestors: UInt64
    slots: Int32
    positions: Int32


@dataclass(frozen=True, slots=True, eq=False)
class StepTrees(Sequence[TreeRows | None]):
    """What the rows of a step's requests see; each `TreeRows` is made when one is asked for.

    Requests with trees come first, and their columns are their own rows, as of all steps that the
    engine builds.

    ancestors         uint64  of all trees, one behind the other
    starts            int32 [requests + 1]  as `StepInput.request_starts`
    slots, positions  int32 [rows]  of the step
    num_trees         requests that have one; the others are prompt chunks
    """

    ancestors: UInt64
    starts: Int32
    slots: Int32
    positions: Int32
    num_trees: int
    _made: list[TreeRows | None] = field(default_factory=list, init=False)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> TreeRows | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[TreeRows | None]: ...

    def __getitem__(self, index: int | slice) -> TreeRows | list[TreeRows | None] | None:
        # Made anew by each of several threads that ask at once.
        if not self._made:
            self._made[:] = self._make()
        return self._made[index]

    @property
    def shapes(self) -> Int32:
        """int32 [trees, 2]: rows and words of each in `ancestors`."""
        rows = np.diff(self.starts[: self.num_trees + 1])
        return np.stack([rows, -(-rows // WORD_BITS)], axis=1)

    def _make(self) -> list[TreeRows | None]:
        found: list[TreeRows | None] = [None] * len(self)
        starts, first_word = self.starts.tolist(), 0
        for index, (rows, words) in enumerate(self.shapes.tolist()):
            own = slice(starts[index], starts[index + 1])
            bits = self.ancestors[first_word : first_word + rows * words].reshape(rows, words)
            found[index] = TreeRows(bits, self.slots[own], self.positions[own])
            first_word += rows * words
        return found


@dataclass(frozen=True, slots=True, eq=False)
class TreeCandidates:
    """The candidates of one tree, in the order of their tests.

    rule                that decides about them (`core/verify/rules.py`)
    num_nodes           of the tree
    parents             int32 [c]  the nodes that they follow; -1 is the root
    nodes               int32 [c]  their own; several candidates of one token share a node
    tokens              int32 [c]
    distribution_ids    int32 [c, k]  and
    distribution_probs  float32 [c, k]  what each was drawn from; rows of zeros where it is no draw
    """

    rule: str
    num_nodes: int
    parents: Int32
    nodes: Int32
    tokens: Int32
    distribution_ids: Int32
    distribution_probs: Float32


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """Candidates of a step's trees, in order, and the keys of the rules' random numbers.

    seeds, positions  by tree: the request's seed, and the root's absolute position
    """

    trees: tuple[TreeCandidates, ...]
    seeds: tuple[int, ...]
    positions: tuple[int, ...]


class VerificationResult(NamedTuple):
    """The accepted nodes, from the root down, and the token after the last of them."""

    path: list[int]
    token: int


# Buckets of accepted lengths: what a request's last step says of its next one. Texts copy in runs.
# After a step in which nothing was accepted, n-grams and retrieved texts are right again for a
# token or two; after one of many accepted nodes, for many. Drafters are chosen by it.
# Here: most accepted nodes of a step in each bucket but the last.
BUCKET_LENGTHS = (0, 3)
NUM_LENGTH_BUCKETS = len(BUCKET_LENGTHS) + 1
# A bit for each bucket.
EVERY_LENGTH_BUCKET = (1 << NUM_LENGTH_BUCKETS) - 1
# Beside them: also where a chunk of a pipelined tree was accepted down to a leaf, behind which
# chunks in flight may go on.
AT_LEAVES = 1 << NUM_LENGTH_BUCKETS


def length_bucket_of(num_accepted: int) -> int:
    """The bucket of a step in which so many nodes were accepted."""
    return bisect_left(BUCKET_LENGTHS, num_accepted)


def is_in(length_buckets: int, num_accepted: int, at_leaf: bool = False) -> bool:
    """Whether a step in which so many nodes were accepted is in one of the buckets, bits.

    num_accepted  -1: nothing is known of them yet
    at_leaf       whether a chunk of a pipelined tree was accepted down to a leaf
    """
    if num_accepted < 0 or (at_leaf and not length_buckets & AT_LEAVES):
        return False
    return bool(length_buckets >> length_bucket_of(num_accepted) & 1)


class HeadTask(NamedTuple):
    """What a head of the last stage does in a step: it reads what is committed of some requests,
    and drafts what may follow.

    source     its name
    requests   their indices in the step, rising
    max_nodes  of each one's tree, at most; 0 of a prompt chunk that is not the last
    length_buckets  bits of accepted-length buckets: after which of each one's tree it does so
    level_tokens  what a further level of all its trees takes, in tokens that would save as much
    """

    source: str
    requests: tuple[int, ...]
    max_nodes: tuple[int, ...]
    length_buckets: tuple[int, ...]
    level_tokens: float = 0.0

    def after(self, num_accepted: Sequence[int], at_leaves: Collection[int] = ()) -> HeadTask:
        """Its part for a step in whose trees so many nodes were accepted; of prompts all of it.

        num_accepted  -1 of chunks that say nothing new; those `at_leaves` were right down to one
        """
        is_due = [
            request >= len(num_accepted)
            or is_in(length_buckets, num_accepted[request], request in at_leaves)
            for request, length_buckets in zip(self.requests, self.length_buckets, strict=True)
        ]
        if all(is_due):
            return self
        requests, max_nodes, length_buckets = (tuple(compress(own, is_due)) for own in self[1:4])
        return self._replace(requests=requests, max_nodes=max_nodes, length_buckets=length_buckets)


class HeadDrafts(NamedTuple):
    """What a head of the last stage drafted: a proposal for each request of its `HeadTask.after`
    the step, which goes on from what that commits. None at all where it failed.

    texts      each one's request and the tokens of the text that its proposal stands behind
    seconds    that reading and drafting took
    last_rows  int32 [trees]  of each tree that is no chunk, the last row, from its root on, that
               the stage took for committed: what the coordinator finds, too. None: not given
    num_levels  of its trees that took a pass each; 0: one drafted all of them
    """

    source: str
    seconds: float
    proposals: tuple[Proposal, ...]
    last_rows: Int32 | None = None
    num_levels: int = 0
    texts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ProbeInput:
    """Rows whose most probable next tokens drafters want.

    rows   int32 [q]  rows of probes, and rows of trees
    top_k  tokens wanted of each row
    """

    rows: Int32
    top_k: int


@dataclass(frozen=True, slots=True, eq=False)
class LogProbInput:
    """The log-probabilities that a step wants, of the unprocessed distributions.

    of_targets      whether that of every target token is wanted
    num_top         how many of the most probable tokens are wanted beside each log-probability
    with_entropies  whether the entropy of the distribution of every target token is wanted
    scored_rows, scored_tokens  int32 [s]  rows, and for each the token whose log-probability after
                    it is wanted
    """

    of_targets: bool = False
    num_top: int = 0
    with_entropies: bool = False
    scored_rows: Int32 = field(default_factory=lambda: NO_ROWS)
    scored_tokens: Int32 = field(default_factory=lambda: NO_ROWS)


@dataclass(frozen=True, slots=True, eq=False)
class MultiStepInput:
    """Several target tokens of each row, which the stage decodes one after the other
    (`multi_step_ms`).

    The step has one row a request and wants nothing but target tokens. The stage may decode fewer
    once all answers have ended.

    num_tokens  tokens of each row, above 1
    end_ids     int32 [requests, n]  tokens that end each answer, padded with -1
    """

    num_tokens: int
    end_ids: Int32


@dataclass(frozen=True, slots=True, eq=False)
class HeadInput:
    """What trained heads read of a step, and draft after it. In a step of several tokens a
    request (`multi_step`) they only read: no task has requests.

    feature_requests  indices of requests, rising, whose features are returned: those of all rows of
                      a prompt chunk, of a tree's root and its accepted nodes
    chunk_requests    likewise, those whose trees are chunks (`core/pipelined/`). Whether a node of
                      a chunk is accepted may not be known yet: features of all nodes are returned
                      where any are
    tasks             of the heads that draft in the last stage
    following_tokens  int32 [prompt chunks]  the token of the text behind each chunk, -1 where the
                      step chooses it; None where no head has a task
    """

    feature_requests: tuple[int, ...] = ()
    chunk_requests: tuple[int, ...] = ()
    tasks: tuple[HeadTask, ...] = ()
    following_tokens: Int32 | None = None


# Of steps that want none of it.
NO_PROBES, NO_LOG_PROBS, NO_HEADS = ProbeInput(NO_ROWS, 0), LogProbInput(), HeadInput()


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """One batch for the pipeline: prompt chunks and token trees of several requests.

    moves          int32 [m, 2]  KV copies (from slot, to slot), done first, all read before written
    token_ids      int32 [rows]
    positions      int32 [rows]  absolute
    slots          int32 [rows]  where the row's KV is written
    request_starts int32 [requests + 1]  rows of request r are request_starts[r]:request_starts[r+1]
    context_lens   int32 [requests]  cached positions 0..n-1 that every row of the request sees
    block_tables   int32 [requests, blocks]  position p is in block block_tables[r, p // block_size]
    trees          per request: TreeRows, or None for a prompt chunk (causal among its own rows)
    logits_rows    int32 [k]  rows that get a target token, in the order of `sampling`
    edits          changes to the logits of some of them, before sampling
    verification   candidates of all trees, which a rule decides about; None: target tokens do
    log_probs      the log-probabilities that are wanted
    probes         the most probable tokens that drafters want
    multi_step     several tokens a request; None: one
    heads          what trained heads read and draft
    is_traced      whether each stage notes when it began and ended the step
    request_keys   names the requests from step to step, so that stages know again what they keep
                   of each; another once its KV was given up. None: nothing is like the step before
    state_slots    int32 [requests]  slots of their states, in layers that keep them; no two share
                   one. A text begins in a slot with a prompt chunk behind no context. Empty: no
                   layer keeps states
    state_loads    int32 [m, 2]  copies between slots (from, to) before all rows, and
    state_saves    int32 [m, 2]  behind them; in slots of prompt chunks, and in slots of no request
    """

    step_id: int
    moves: Int32
    token_ids: Int32
    positions: Int32
    slots: Int32
    request_starts: Int32
    context_lens: Int32
    block_tables: Int32
    trees: Sequence[TreeRows | None]
    logits_rows: Int32
    sampling: SamplingRows
    edits: tuple[LogitEdits, ...] = ()
    verification: Verification | None = None
    log_probs: LogProbInput = NO_LOG_PROBS
    probes: ProbeInput = NO_PROBES
    multi_step: MultiStepInput | None = None
    heads: HeadInput = NO_HEADS
    is_traced: bool = False
    request_keys: tuple[int, ...] = ()
    state_slots: Int32 = field(default_factory=lambda: NO_ROWS)
    state_loads: Int32 = field(default_factory=lambda: NO_PAIRS)
    state_saves: Int32 = field(default_factory=lambda: NO_PAIRS)


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The most probable tokens of some rows, best first, by the unprocessed distribution.

    ids       int32 [rows, num_top]
    log_probs float32 [rows, num_top]  nats
    """

    ids: Int32
    log_probs: Float32


@dataclass(frozen=True, slots=True, eq=False)
class LogProbOutput:
    """What `LogProbInput` asks for, of the unprocessed distributions, in nats; None if not wanted.

    of_targets  float32 [len(logits_rows)]  log-probabilities of the target tokens
    top         the most probable tokens of `logits_rows`
    entropies   float32 [len(logits_rows)]
    scores      float32 [len(scored_rows)]  log-probabilities of `scored_tokens`
    scored_top  the most probable tokens of `scored_rows`
    """

    of_targets: Float32 | None = None
    top: TopTokens | None = None
    entropies: Float32 | None = None
    scores: Float32 | None = None
    scored_top: TopTokens | None = None


# Of steps that want none.
NO_LOG_PROB_OUTPUT = LogProbOutput()


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What the last stage sends back: small integers, never logits.

    target_tokens         int32 [len(logits_rows)]
    probe_ids             int32 [len(probes.rows), probes.top_k], best first; None: no probes
    log_probs             the log-probabilities that the step wanted
    verification_results  of each tree, where the step had a verification
    decoded               int32 [len(logits_rows), n]  the target tokens and those behind them, at
                          most `multi_step.num_tokens`; None where the step wants one
    features              float32 [rows, width]  hidden states of the target, of the requests whose
                          features are wanted, one behind the other, in the order of positions
    head_drafts           of each of the step's head tasks
    not_finite            int32 [n]  indices in `logits_rows` whose logits are NaN, infinite, or all
                          minus infinity; None: of none. What is chosen there means nothing
    stage_spans           when each stage began and ended the step, wall-clock seconds of its own
                          host; empty if not traced
    """

    step_id: int
    target_tokens: Int32
    probe_ids: Int32 | None = None
    log_probs: LogProbOutput = NO_LOG_PROB_OUTPUT
    verification_results: tuple[VerificationResult, ...] | None = None
    decoded: Int32 | None = None
    features: Float32 | None = None
    head_drafts: tuple[HeadDrafts, ...] = ()
    not_finite: Int32 | None = None
    stage_spans: tuple[Span, ...] = ()


def prompt_step(count: int, block_size: int) -> StepInput:
    """A prompt of `count` tokens, every one of which gets a target token, as nodes do.

    It writes the first `count` slots, and the first state: only for caches that hold nothing yet.
    """
    index = np.arange(count, dtype=np.int32)
    return StepInput(
        step_id=0,
        moves=np.empty((0, 2), dtype=np.int32),
        token_ids=np.zeros(count, dtype=np.int32),
        positions=index,
        slots=index,
        request_starts=np.array([0, count], dtype=np.int32),
        context_lens=np.zeros(1, dtype=np.int32),
        block_tables=np.arange(-(-count // block_size), dtype=np.int32)[None],
        trees=(None,),
        logits_rows=index,
        sampling=SamplingRows.greedy(index.astype(np.int64) + 1),
        state_slots=np.zeros(1, dtype=np.int32),
    )
