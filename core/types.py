"""The values that cross the borders between the parts, and the words for them.

target    the served model; its distribution is the only one users ever see
drafter   proposes continuations; `source` is its name in proposals and metrics
proposal  a drafter's answer for one request: a forest of tokens below the last committed token
tree      all proposals of a request merged; a parent of -1 means the last committed token (root)
node      one token of a tree
step      one batch of rows that enters stage 0 and leaves the last stage
row       one token of a step
slot      one token's place in a stage's paged KV cache: block id * block size + offset

All arrays are numpy and are never written after construction.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .draft_distributions import DraftDistributions
from .errors import ProtocolError
from .logits_params import UNSHAPED, LogitsParams

if TYPE_CHECKING:
    from .candidates import VerificationResult
    from .verify.verification import Verification

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
# Begin and end, seconds.
Span = tuple[float, float]

ROOT = -1
LOG_PROB_SLACK = 1e-3
# Rows that a request's drafters may probe with in one step, whatever they ask for.
MAX_PROBE_ROWS = 64
# Most nodes of one proposal. Four times what any query asks for: a drafter need not cut by itself.
MAX_PROPOSAL_NODES = 1024
# Next tokens that a drafter may ask for after a row.
MAX_TOP_NEXT_TOKENS = 64


def _all_below(ids: Int32, bound: int) -> bool:
    """Whether 0 <= id < bound for all."""
    values = ids.tolist()
    return not values or (min(values) >= 0 and max(values) < bound)


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Extra rows that a drafter asks the target to compute for it; they are never committed.

    tokens  int32 [n]
    offsets int32 [n]    position of each row minus the position of the root; at least 1
    mask    bool [n, n]  row i sees the committed context with the root, and rows j with mask[i, j]
    wanted  int32 [k]    rows whose most probable next tokens come back through `Commit`
    top_k   how many ids come back for each wanted row
    """

    tokens: Int32
    offsets: Int32
    mask: Bool
    wanted: Int32
    top_k: int

    def check(self, vocab_size: int, max_rows: int) -> None:
        """Raise `ProtocolError` unless the arrays agree and stay within the limits.

        `max_rows` also bounds offsets and `top_k`, so that no probe can ask for much work.
        """
        count = len(self.tokens)
        ids = (self.tokens, self.offsets, self.wanted)
        shapes = (self.tokens.shape, self.offsets.shape, self.mask.shape, self.wanted.ndim)
        if count > max_rows or not 1 <= self.top_k <= min(max_rows, vocab_size):
            raise ProtocolError("probe: too many rows, or top_k out of range")
        if shapes != ((count,), (count,), (count, count), 1) or len(self.wanted) > count:
            raise ProtocolError("probe: arrays differ in shape")
        if any(array.dtype != np.int32 for array in ids) or self.mask.dtype != np.bool_:
            raise ProtocolError("probe: mask must be bool, the other arrays int32")
        if not _all_below(self.tokens, vocab_size):
            raise ProtocolError("probe: token id outside the vocabulary")
        if not _all_below(self.offsets - 1, max_rows) or not _all_below(self.wanted, count):
            raise ProtocolError("probe: an offset or a wanted row is out of range")


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """What one drafter proposes for one request.

    tokens                 int32 [n]    target token ids
    parents                int32 [n]    index of the parent node, always smaller than the own index;
                           -1 is root
    log_probs float32 [n]  log-probability of each token given its parent; 0 if unknown
    probe                  rows that are computed for the drafter beside the tree
    num_top_next_tokens    how many of the target's most probable next tokens after the root and
                           every node of the request's tree come back through `Commit`, whoever
                           proposed them
    distributions          what the nodes were drawn from; None: they are no draws. Only acceptance
                           rules other than `coupled` look at them

    Nodes stand in the drafter's order of preference; a cut keeps a prefix.
    """

    source: str
    tokens: Int32
    parents: Int32
    log_probs: Float32
    probe: Probe | None = None
    num_top_next_tokens: int = 0
    distributions: DraftDistributions | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it neither proposes nor asks for anything."""
        return not (len(self.tokens) or self.probe or self.num_top_next_tokens)

    def check(self, vocab_size: int) -> None:
        """Raise `ProtocolError` unless there are at most `MAX_PROPOSAL_NODES` nodes, shapes and
        dtypes agree, ids and log-probabilities are possible, parents precede children and
        `num_top_next_tokens` is within the limits.
        """
        self._check_arrays()
        count = len(self.tokens)
        # Lists, because a proposal is short: numpy would take longer to start each operation.
        if not _all_below(self.tokens, vocab_size):
            raise ProtocolError(f"proposal of {self.source}: token id outside the vocabulary")
        parents = self.parents.tolist()
        if min(parents, default=ROOT) < ROOT or not all(map(operator.lt, parents, range(count))):
            raise ProtocolError(f"proposal of {self.source}: a parent does not precede its child")
        values = self.log_probs.tolist()
        # The slack is for the rounding of a logarithm of 1; a NaN makes the sum one.
        if max(values, default=0.0) > LOG_PROB_SLACK or math.isnan(sum(values)):
            raise ProtocolError(f"proposal of {self.source}: a log-probability is above 0 or NaN")
        if operator.index(self.num_top_next_tokens) not in range(
            min(vocab_size, MAX_TOP_NEXT_TOKENS) + 1
        ):
            raise ProtocolError(f"proposal of {self.source}: num_top_next_tokens is out of range")
        if self.distributions is not None:
            self.distributions.check(self.tokens, vocab_size)

    def _check_arrays(self) -> None:
        count = len(self.tokens)
        # Before all else: nothing below may look at so many numbers.
        if count > MAX_PROPOSAL_NODES:
            raise ProtocolError(
                f"proposal of {self.source}: {count} nodes; at most {MAX_PROPOSAL_NODES}"
            )
        if not (self.tokens.shape == self.parents.shape == self.log_probs.shape == (count,)):
            raise ProtocolError(f"proposal of {self.source}: arrays differ in shape")
        if not (self.tokens.dtype == self.parents.dtype == np.int32):
            raise ProtocolError(f"proposal of {self.source}: tokens and parents must be int32")
        if self.log_probs.dtype != np.float32:
            raise ProtocolError(f"proposal of {self.source}: log_probs must be float32")


def empty_proposal(source: str) -> Proposal:
    """A proposal of no nodes."""
    none = np.empty(0, dtype=np.int32)
    return Proposal(source, none, none, np.empty(0, dtype=np.float32))


def chain_proposal(source: str, tokens: Int32, log_probs: Float32 | None = None) -> Proposal:
    """A proposal of one path."""
    count = len(tokens)
    probs = np.zeros(count, dtype=np.float32) if log_probs is None else log_probs
    parents = np.arange(-1, count - 1, dtype=np.int32)
    return Proposal(source, tokens.astype(np.int32), parents, probs)


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """What a drafter learns when a request opens, or opens again after the drafter was lost.

    token_ids      int32 [n]  all committed tokens: the prompt and what was generated so far
    prompt_len     how many of them are the prompt
    seed           of the request's sampling noise (`core/sampling/noise.py`)
    namespace      whose retrieval data may be read besides `shared`
    logits_params  what else changes the distribution of its tokens
    end_ids        tokens that end the answer, which are not chosen before
                   `logits_params.min_tokens`
    cache_salt     what is learned from a request serves only those of its namespace and salt
    store          whether anything may be learned from the request at all
    """

    request_id: str
    token_ids: Int32
    prompt_len: int
    temperature: float
    seed: int
    namespace: str = "shared"
    logits_params: LogitsParams = UNSHAPED
    end_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    store: bool = True


@dataclass(frozen=True, slots=True)
class Query:
    """Asks for a proposal that continues a request's first `committed_len` tokens."""

    request_id: str
    committed_len: int
    max_nodes: int


@dataclass(frozen=True, slots=True, eq=False)
class TopNextTokens:
    """What the target found most probable after the rows of a request's tree.

    tokens  int32 [n]     the root and then the nodes, accepted or not
    ids     int32 [n, k]  next tokens after each, best first, by the unprocessed distribution
    """

    tokens: Int32
    ids: Int32


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """Tokens appended to a request by one step.

    base_len   committed tokens before this commit
    tokens     int32 [n], n >= 1; the last one is the bonus token
    probe_ids  int32 [k, top_k] most probable next tokens of the probe rows that this drafter wanted
               in the verified step, best first; None if it sent no probe or the probe was dropped
    top next tokens after the rows of the verified tree; None if this drafter did not ask for them
    """

    request_id: str
    base_len: int
    tokens: Int32
    probe_ids: Int32 | None = None
    top_next_tokens: TopNextTokens | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepCommit:
    """Tokens appended to a request by one step, for all drafters.

    `probe_ids` and `top_next_tokens` hold, by source, the answers to what the proposals asked for;
    the rest is as in `Commit`.
    """

    request_id: str
    base_len: int
    tokens: Int32
    probe_ids: Mapping[str, Int32] = field(default_factory=dict)
    top_next_tokens: Mapping[str, TopNextTokens] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True, eq=False)
class TreeRows:
    """What the rows of one request see besides the committed context.

    ancestors  uint64 [rows of the request, words]  a bit a column (`core/tree/ancestor_bits.py`)
    slots      int32 [columns]  KV slot of each column
    positions  int32 [columns]  absolute position of each column

    The request's own rows are the last columns, in row order. Columns before them are nodes of
    earlier steps that are still in flight, so that a tree can be streamed through the pipeline.
    """

    ancestors: UInt64
    slots: Int32
    positions: Int32


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
    probe_rows     int32 [q]  rows whose `probe_top_k` most probable ids drafters want: of their
                   probes, and of trees
    scored_rows    int32 [s]  rows whose log-probability of `scored_tokens` int32 [s] is wanted
    with_log_probs whether the log-probability of every target token is wanted
    with_entropies whether the entropy of the distribution of every target token is wanted
    verification   candidates of all trees, which a rule decides about; None: target tokens do
    num_top        how many of the most probable tokens are wanted beside each log-probability
    is_traced      whether each stage notes when it began and ended the step
    """

    step_id: int
    moves: Int32
    token_ids: Int32
    positions: Int32
    slots: Int32
    request_starts: Int32
    context_lens: Int32
    block_tables: Int32
    trees: tuple[TreeRows | None, ...]
    logits_rows: Int32
    sampling: SamplingRows
    probe_rows: Int32
    probe_top_k: int
    scored_rows: Int32
    scored_tokens: Int32
    with_log_probs: bool = False
    with_entropies: bool = False
    verification: Verification | None = None
    edits: tuple[LogitEdits, ...] = ()
    num_top: int = 0
    is_traced: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The most probable tokens of some rows, best first, by the unprocessed distribution.

    ids       int32 [rows, num_top]
    log_probs float32 [rows, num_top]  nats
    """

    ids: Int32
    log_probs: Float32


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What the last stage answers: small integers, never logits.

    target_tokens         int32 [len(logits_rows)]
    probe_ids             int32 [len(probe_rows), probe_top_k], best first
    scores                float32 [len(scored_rows)]  unprocessed log-probabilities, nats
    log_probs             float32 [len(logits_rows)]  the same of `target_tokens`; None if not
                          wanted
    entropies             float32 [len(logits_rows)]  of the unprocessed distributions, nats; None
                          if not wanted
    verification_results  of each tree, where the step had a verification
    top                   the most probable tokens of `logits_rows`; None if not wanted
    scored_top            the same of `scored_rows`
    stage_spans           when each stage began and ended the step, wall-clock seconds of its own
                          host; empty if not traced
    """

    step_id: int
    target_tokens: Int32
    probe_ids: Int32
    scores: Float32
    log_probs: Float32 | None = None
    top: TopTokens | None = None
    scored_top: TopTokens | None = None
    entropies: Float32 | None = None
    verification_results: tuple[VerificationResult, ...] | None = None
    stage_spans: tuple[Span, ...] = ()
