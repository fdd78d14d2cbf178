"""The output of requests: deltas, log-probabilities and metrics; and what the target chose."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from ..arrays import Float32, Int32
from ..errors import DraftlineError
from ..steps import StepOutput, TopTokens
from ..tree.tree import TokenTree

FinishReason = Literal["stop", "length", "cancelled"]
# The stop text or the stop token's id that ended an answer; None for any other end.
StopReason = str | int | None

# The source of a token that no drafter proposed: the target's own next token.
TARGET_SOURCE = "target"
# Most nodes of a tree that is shown.
MAX_SHOWN_NODES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Counts and times of one finished request. Times are seconds of the engine's clock.

    cached_tokens      prompt tokens whose KV was there already
    num_preemptions    how often its KV was given to others and computed again
    num_steps          verification steps: steps that committed tokens after the prompt
    num_draft_tokens   nodes verified
    drafted_by_source, accepted_by_source  nodes credited to the drafter that proposed them first
    accepted_lengths   accepted nodes of each verification step
    start_time         when it left the queue first
    acceptance         the rule that decided about its drafts (`core/verify/rules.py`)
    """

    prompt_tokens: int
    generated_tokens: int
    num_steps: int
    num_draft_tokens: int
    drafted_by_source: Mapping[str, int] = field(default_factory=dict)
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    accepted_lengths: tuple[int, ...] = ()
    cached_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    start_time: float = 0.0
    first_token_time: float = 0.0
    finish_time: float = 0.0
    acceptance: str = "coupled"

    @property
    def num_accepted_tokens(self) -> int:
        """Nodes that were committed."""
        return sum(self.accepted_by_source.values())

    @property
    def acceptance_length(self) -> float:
        """tau: tokens committed a verification step, bonus token included; 1.0 before any.

        The first token came with the prompt, from no verification step.
        """
        return (self.generated_tokens - 1) / self.num_steps if self.num_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the verified nodes that were committed."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


class TokenLogProb(NamedTuple):
    """A token's log-probability by the target's own distribution, nats, and the most probable
    tokens'.

    top_ids        the most probable tokens, best first
    top_log_probs  theirs, nats; two tuples, since pairs would be many objects for the garbage
                   collector
    """

    token_id: int
    log_prob: float
    top_ids: tuple[int, ...] = ()
    top_log_probs: tuple[float, ...] = ()

    @property
    def top(self) -> Iterator[tuple[int, float]]:
        """Pairs of a token id and its log-probability, best first."""
        return zip(self.top_ids, self.top_log_probs, strict=True)


class StepTiming(NamedTuple):
    """When the parts of a step were, seconds of the engine's clock.

    asked         drafters that were asked for the request
    drafted_at, draft_s    when drafters were asked, and how long they were waited for
    finished_at, verify_s  when the stages had finished, and what they took since the step's
                  submission, or since the step before it finished
    committed_at  when the request had its tokens
    """

    asked: tuple[str, ...]
    drafted_at: float
    draft_s: float
    finished_at: float
    verify_s: float
    committed_at: float


class VerifiedTree(NamedTuple):
    """What one step verified of a request, for an operator who watches.

    root_id       the token that the tree grew from, the last one committed before
    token_ids, parents, sources, values  of its nodes, in parallel and in topological order: the
                  parents' indices, -1 for the root; drafters' names; how probable the engine took
                  a path through the node to be
    path          indices of the nodes that were committed, from the root on
    num_left_out  nodes beyond the first `MAX_SHOWN_NODES`; those of the path are always here
    """

    root_id: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...]
    values: tuple[float, ...]
    path: tuple[int, ...]
    num_left_out: int
    timing: StepTiming

    @classmethod
    def of(
        cls, tree: TokenTree, root_id: int, path: Sequence[int], timing: StepTiming
    ) -> VerifiedTree:
        """That of a tree and the indices of its nodes that were committed."""
        kept = [*range(min(len(tree), MAX_SHOWN_NODES))]
        kept += [node for node in path if node >= MAX_SHOWN_NODES]
        indices = {node: index for index, node in enumerate(kept)} | {-1: -1}
        nodes = tree.nodes[kept]
        return cls(
            root_id=root_id,
            token_ids=tuple(nodes[:, 0].tolist()),
            parents=tuple(indices[parent] for parent in nodes[:, 1].tolist()),
            sources=tuple(tree.names[source] for source in nodes[:, 3].tolist()),
            values=tuple(tree.values[kept].tolist()),
            path=tuple(indices[node] for node in path),
            num_left_out=len(tree) - len(kept),
            timing=timing,
        )


class Delta(NamedTuple):
    """What one step adds to a request's answer.

    token_ids and sources run in parallel; a source is a drafter's name or `TARGET_SOURCE`.
    log_probs, if they were asked for, run in parallel to them; those of the prompt, whose first
    token has none, come with the first delta.
    text is final: it never takes part in a later stop text, and may lag behind token_ids.
    The last delta has a finish_reason, its stop_reason and metrics.
    trees are those that its tokens come from, of requests that are explained.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    text: str
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None
    log_probs: tuple[TokenLogProb, ...] = ()
    prompt_log_probs: tuple[TokenLogProb | None, ...] | None = None
    stop_reason: StopReason = None
    trees: tuple[VerifiedTree, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A whole answer; log-probabilities as in `Delta`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    text: str
    finish_reason: FinishReason
    metrics: RequestMetrics
    log_probs: tuple[TokenLogProb, ...] = ()
    prompt_log_probs: tuple[TokenLogProb | None, ...] | None = None
    stop_reason: StopReason = None


@dataclass(slots=True)
class OutputCollector:
    """A sink (`core/request/request.py`): the engine's thread fills it, another waits for it."""

    request_id: str
    prompt_ids: tuple[int, ...] = ()
    deltas: list[Delta] = field(default_factory=list)
    error: DraftlineError | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def on_output(self, event: Delta | DraftlineError) -> None:
        """Take the next delta, or the error that ends the request."""
        if isinstance(event, DraftlineError):
            self.error = event
        else:
            self.deltas.append(event)
        if self.error is not None or self.deltas[-1].finish_reason is not None:
            self.done.set()

    def wait(self) -> RequestOutput:
        """The whole answer, when it is there. Raises the error that ended the request."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        last = self.deltas[-1]
        assert last.finish_reason is not None
        assert last.metrics is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_ids,
            token_ids=tuple(token for delta in self.deltas for token in delta.token_ids),
            sources=tuple(source for delta in self.deltas for source in delta.sources),
            text="".join(delta.text for delta in self.deltas),
            finish_reason=last.finish_reason,
            metrics=last.metrics,
            log_probs=tuple(entry for delta in self.deltas for entry in delta.log_probs),
            prompt_log_probs=self.deltas[0].prompt_log_probs,
            stop_reason=last.stop_reason,
        )


class Chosen(NamedTuple):
    """The target's tokens after some rows of one request.

    tokens     int32 [rows]
    log_probs  float32 [rows]; None if no request of the step wants them
    top        of the same rows; None likewise
    features   float32 [rows, width]  the hidden states of tree chunks, if wanted; else None
    """

    tokens: Int32
    log_probs: Float32 | None
    top: TopTokens | None
    features: Float32 | None = None

    def logprobs_of(self, rows: Iterable[int], num_top: int | None) -> tuple[TokenLogProb, ...]:
        """Log-probabilities of the tokens after `rows`; none if `num_top` is None."""
        if num_top is None or self.log_probs is None:
            return ()
        return tuple(
            token_log_prob(int(self.tokens[row]), self.log_probs, self.top, row, num_top)
            for row in rows
        )

    @classmethod
    def of_rows(cls, output: StepOutput, rows: slice) -> Chosen:
        """Those of a step's output, of these of its `logits_rows`."""
        log_probs, top = output.log_probs.of_targets, output.log_probs.top
        return cls(
            output.target_tokens[rows],
            None if log_probs is None else log_probs[rows],
            None if top is None else TopTokens(top.ids[rows], top.log_probs[rows]),
        )

    @classmethod
    def along(cls, outputs: Sequence[RowOutput]) -> Chosen:
        """What was chosen after rows of several outputs, one behind the other."""
        tokens = np.array([own.tokens[row] for own, row in outputs], dtype=np.int32)
        log_probs = [own.log_probs[row] for own, row in outputs if own.log_probs is not None]
        tops = [(own.top, row) for own, row in outputs if own.top is not None]
        is_told = len(log_probs) == len(tokens)
        return cls(
            tokens,
            np.array(log_probs, dtype=np.float32) if is_told else None,
            _top_along(tops) if tops and len(tops) == len(tokens) else None,
        )


# What was chosen after a row: of which rows it is one, and which.
RowOutput = tuple[Chosen, int]


def _top_along(tops: Sequence[tuple[TopTokens, int]]) -> TopTokens:
    # Steps give as many as one of their requests wants.
    count = min(top.ids.shape[1] for top, _ in tops)
    return TopTokens(
        np.stack([top.ids[row, :count] for top, row in tops]),
        np.stack([top.log_probs[row, :count] for top, row in tops]),
    )


def token_log_prob(
    token: int, log_probs: Float32, top: TopTokens | None, row: int, num_top: int
) -> TokenLogProb:
    """The log-probability of a token after a row, beside those of the most probable ones."""
    log_prob = float(log_probs[row])
    if top is None:
        return TokenLogProb(token, log_prob)
    ids, values = top.ids[row, :num_top], top.log_probs[row, :num_top]
    return TokenLogProb(token, log_prob, tuple(ids.tolist()), tuple(values.tolist()))
