"""Between the engine and its drafters: what is asked, proposed and committed.

target    the served model; its distribution is the only one users ever see
drafter   proposes continuations; `source` is its name in proposals and metrics
proposal  a drafter's reply for one request: a forest of tokens below the last committed token
tree      all proposals of a request merged; a parent of -1 means the last committed token (root)
node      one token of a tree
step      one batch of rows that enters stage 0 and leaves the last stage
row       one token of a step
slot      one token's position in a stage's paged KV cache: block id * block size + offset

All arrays are numpy and are never written after construction. What is made for every request of
every step is a named tuple, which is made in a third of the time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from .arrays import ROOT, Bool, Float32, Int32
from .errors import (
    MAX_INT32,
    ProtocolError,
    are_token_ids,
    is_number,
    is_token_id,
    is_whole,
    require,
)

LOG_PROB_SLACK = 1e-3
# Rows that a drafter may probe with for a request in one step, whatever it asks for.
MAX_PROBE_ROWS = 64
# The same of all drafters together; what does not fit is left out, in order of priority.
MAX_PROBE_ROWS_OF_ALL = 2 * MAX_PROBE_ROWS
# Most nodes of one proposal. Four times what any query asks for: a drafter need not cut by itself.
MAX_PROPOSAL_NODES = 1024
# Most tokens of a path that a drafter is asked behind, of those that are not committed.
MAX_ASSUMED_TOKENS = 256
# Next tokens that a drafter may ask for after a row.
MAX_TOP_NEXT_TOKENS = 64
# Of the tokens that are expected of a further level of drafts: what others do not bring, and rows
# leave.
LEVEL_SHARE = 0.8
MAX_BIAS = 100.0
MAX_PENALTY = 2.0


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
class DraftDistributions:
    """What the nodes of a proposal were drawn from, each given all that was drawn before it.

    ids    int32 [n, k]  the only tokens that could be drawn
    probs  float32 [n, k]  of these; they add up to 1. A row of zeros: the node is no draw, but a
           function of the past
    """

    ids: Int32
    probs: Float32

    def rows(self, indices: Sequence[int] | slice) -> DraftDistributions:
        """The distributions of the nodes at `indices`."""
        return DraftDistributions(self.ids[indices], self.probs[indices])

    def check(self, tokens: Int32, vocab_size: int) -> None:
        """Raise `ProtocolError` unless these tokens can have been drawn so."""
        if self.ids.ndim != 2 or self.ids.shape != self.probs.shape:
            raise ProtocolError("distributions: arrays differ in shape")
        if len(self.ids) != len(tokens) or self.ids.shape[1] > vocab_size:
            raise ProtocolError("distributions: not a row for each node, or rows too long")
        if self.ids.dtype != np.int32 or self.probs.dtype != np.float32:
            raise ProtocolError("distributions: ids must be int32 and probabilities float32")
        if not ((self.ids >= 0) & (self.ids < vocab_size)).all():
            raise ProtocolError("distributions: a token id is outside the vocabulary")
        sums = self.probs.sum(axis=1, dtype=np.float64)
        is_draw = self.probs.any(axis=1)
        # A NaN fails every comparison.
        if not (self.probs >= 0).all() or not (abs(sums[is_draw] - 1) < DISTRIBUTION_SLACK).all():
            raise ProtocolError("distributions: probabilities do not add up to 1")
        drawn = np.where(self.ids == tokens[:, None], self.probs, 0.0).sum(axis=1)
        if not (drawn[is_draw] > 0).all():
            raise ProtocolError("distributions: a token was drawn that its distribution excludes")


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """What one drafter proposes for one request.

    tokens                 int32 [n]    target token ids
    parents                int32 [n]    index of the parent node, always smaller than the own index;
                           -1 is root
    log_probs float32 [n]  log-probability of each token given its parent; 0 if unknown
    probe                  rows that are computed for the drafter beside the tree
    num_top_next_tokens    how many of the target's most probable next tokens after the root and
                           every node of the request's tree come back through `StepCommit`,
                           whichever drafter proposed them
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsParams:
    """What changes the distribution of tokens, beside temperature and structured output.

    The fields are those of `SamplingParams`, which explains them; the defaults change nothing.
    Raises `RequestError` naming the field.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    @property
    def has_penalties(self) -> bool:
        """Whether a token's place in the text changes its logit."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def __post_init__(self) -> None:
        self._check_filters()
        self._check_penalties()
        self._check_tokens()

    def _check_filters(self) -> None:
        for name in ("top_p", "min_p", "typical_p"):
            require(is_number(getattr(self, name)), name, "must be a finite number")
        for name in ("top_k", "min_tokens"):
            value = getattr(self, name)
            require(is_whole(value), name, "must be a whole number")
            # Steps and messages carry it in 32 bits.
            require(value <= MAX_INT32, name, "must be below 2**31")
        require(self.top_k >= 0, "top_k", "must be 0 (off) or more")
        require(self.min_tokens >= 0, "min_tokens", "must be 0 or more")
        require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", "must be from 0 to 1")
        require(0 < self.typical_p <= 1, "typical_p", "must be above 0 and at most 1")

    def _check_penalties(self) -> None:
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            require(is_number(getattr(self, name)), name, "must be a finite number")
        repetition = self.repetition_penalty
        require(0 < repetition <= 100, "repetition_penalty", "must be above 0 and at most 100")
        for name in ("presence_penalty", "frequency_penalty"):
            require(abs(getattr(self, name)) <= MAX_PENALTY, name, "must be from -2 to 2")

    def _check_tokens(self) -> None:
        allowed, banned = self.allowed_token_ids, self.banned_token_ids
        require(are_token_ids(banned), "banned_token_ids", "must be a tuple of token ids")
        listed = allowed is None or are_token_ids(allowed)
        require(listed, "allowed_token_ids", "must be a tuple of token ids")
        require(allowed != (), "allowed_token_ids", "must not be empty")
        pairs = self.logit_bias.items()
        numbers = all(is_token_id(token) and is_number(bias) for token, bias in pairs)
        require(numbers, "logit_bias", "must give finite numbers by token id")
        limited = all(abs(bias) <= MAX_BIAS for _, bias in pairs)
        require(limited, "logit_bias", "must be from -100 to 100")


UNSHAPED = LogitsParams()


# Probabilities are float32.
DISTRIBUTION_SLACK = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """What a drafter learns when a request opens, or opens again after the drafter was lost.

    token_ids      int32 [n]  all committed tokens: the prompt and what was generated so far
    prompt_len     how many of them are the prompt
    seed           of the request's sampling noise (`core/sampling.py`)
    namespace      whose retrieval data may be read besides `shared`
    logits_params  what else changes the distribution of its tokens
    end_ids        tokens that end the answer, which are not chosen before
                   `logits_params.min_tokens`
    cache_salt     KV, and what is learned from a request, serve only those of its namespace and
                   salt
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

    @property
    def salt(self) -> str:
        """As `RequestOptions.salt`: only requests of the same one share any KV."""
        return cache_key(self.namespace, self.cache_salt)


def cache_key(namespace: str, cache_salt: str) -> str:
    """What the keys of a request's KV blocks begin with."""
    return f"{namespace}\0{cache_salt}"


class Query(NamedTuple):
    """Asks for a proposal that continues a request's first `committed_len` tokens.

    assumed  a path behind these that the target has not confirmed, whose end is the proposal's
             root. None: no path; what is proposed is verified next
    step_s   seconds of a step without drafts for these requests, as the engine has measured it; 0:
             it has not
    token_s  seconds that an accepted token saves, of late; 0: that is not known

    The proposal is the one for a text that ends in the path, by what is known of the committed text
    alone: none of the path is counted, kept or learned, later proposals are what they would be
    without the query. It has no probe. Behind a long path a drafter may have nothing to say.
    """

    request_id: str
    committed_len: int
    max_nodes: int
    assumed: tuple[int, ...] | None = None
    step_s: float = 0.0
    token_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class TopNextTokens:
    """What the target found most probable after the rows of a request's tree.

    tokens  int32 [n]     the root and then the nodes, accepted or not
    ids     int32 [n, k]  next tokens after each, best first, by the unprocessed distribution
    """

    tokens: Int32
    ids: Int32

    def behind(self, earlier: TopNextTokens) -> TopNextTokens:
        """These after those of earlier rows, as many of each as both have."""
        count = min(self.ids.shape[1], earlier.ids.shape[1])
        return TopNextTokens(
            np.concatenate([earlier.tokens, self.tokens]),
            np.concatenate([earlier.ids[:, :count], self.ids[:, :count]]),
        )


class Commit(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class FeatureLayers:
    """Layers of the target whose outputs features are, side by side in this order.

    layers  -1: the embeddings; the last one is normed
    width   numbers of one layer for a token
    """

    layers: tuple[int, ...]
    width: int

    def __str__(self) -> str:
        return f"layers {list(self.layers)} of width {self.width}"

    @property
    def row_len(self) -> int:
        """Numbers of all layers for a token."""
        return len(self.layers) * self.width


class FeatureRows(NamedTuple):
    """The target's hidden states of committed tokens of one request.

    position  of the first of these tokens
    values    float32 [n, row_len] of `FeatureLayers`: as stages hand them out those that
              `StageOptions.feature_layers` names, for a drafter those that it reads
    """

    request_id: str
    position: int
    values: Float32


class StepCommit(NamedTuple):
    """Tokens appended to a request by one step, for all drafters.

    `probe_ids` and `top_next_tokens` hold, by source, what the proposals asked for;
    the rest is as in `Commit`.
    """

    request_id: str
    base_len: int
    tokens: Int32
    probe_ids: Mapping[str, Int32] = MappingProxyType({})
    top_next_tokens: Mapping[str, TopNextTokens] = MappingProxyType({})


class Drafted(NamedTuple):
    """What a head of the last stage drafted in a step.

    source     its name
    seconds    that it took
    proposals  request ids, tokens of the texts that the drafts go on from, and the drafts
    num_levels  of these that took a pass each
    """

    source: str
    seconds: float
    proposals: tuple[tuple[str, int, Proposal], ...]
    num_levels: int = 0


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Seconds of the engine's time that a drafter takes, running means; 0 before it was asked.

    message_s     of a message to it, whatever it asks for
    query_s       of each request that it is asked for, beside that; it receives then what was
                  committed since
    open_token_s  of opening a request, for each token of its text
    is_new        it is asked for a few requests, whatever it brings, until its first drafts have
                  shown what it is
    is_ahead      it drafts at the end of a step for the next one
    level_s       of a further level of what it drafts then
    """

    message_s: float = 0.0
    query_s: float = 0.0
    open_token_s: float = 0.0
    is_new: bool = False
    is_ahead: bool = False
    level_s: float = 0.0

    def seconds(self, num_queries: int) -> float:
        """Of a message that asks for so many requests."""
        return self.message_s + num_queries * self.query_s


def level_tokens(level_s: float, token_s: float) -> float:
    """Tokens that have to be expected of a further level of drafts, so that it saves what it takes.

    token_s  seconds that a token saves; 0: not known, and every level is drafted
    """
    return level_s / (LEVEL_SHARE * token_s) if token_s > 0 else 0.0
