"""Retrieval: continuations of the longest suffix that a store of earlier texts knows.

SPECTRA-RETRIEVAL (Le et al., ACL 2025, 2025.acl-long.685, section 4.2.2) over the queries of REST
(He et al. 2024): the context includes the last committed token, and the answer is a tree of counted
continuations. See docs/drafters.md, "Retrieval".
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..core.arrays import ROOT, Int32
from ..core.errors import ConfigError
from ..core.interfaces import CREDITED, DAMAGED, OUTCOMES, Ended, Learner, Lookup, Subtree
from ..core.proposals import Commit, DraftRequest, Proposal, Query, empty_proposal
from .coupled_rank import CoupledChoice, rank_coupled
from .open_requests import OpenRequests
from .option_checks import require_switches, require_whole

SHARED = "shared"
# The prompt's last tokens are learned, too, so that the answer's first ones are found by them.
PROMPT_TAIL = 16
# The first tokens of a longer answer are learned.
MAX_TOKENS = 2048
SMOOTHED, REST = "smoothed", "rest"
# REST's own (`FasterDecoding/REST`), whose trees have 64 nodes.
PAPER = {"rule": REST, "max_depth": 10, "coupled": False}


def refusal(request: DraftRequest) -> str | None:
    """The reason why a request's text is not learned, one of `OUTCOMES`; None where it may be.

    What is learned may be read by all later requests of the namespace. A store knows namespaces
    but no salts, so what a salt keeps apart is not learned.
    """
    if request.namespace == SHARED:
        return "shared"
    if not request.store:
        return "unstored"
    return "salted" if request.cache_salt else None


class LearnedAnswer:
    """The end of a prompt, the answer so far, and which runs of it were proposed."""

    __slots__ = ("_accepted", "_answer_start", "_namespace", "_proposal", "_tokens")

    def __init__(self, request: DraftRequest) -> None:
        start = max(request.prompt_len - PROMPT_TAIL, 0)
        self._namespace = request.namespace
        self._tokens = array("i", request.token_ids[start:].tolist())
        self._answer_start = request.prompt_len - start
        self._accepted: list[tuple[int, int]] = []
        self._proposal: Proposal | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the tokens."""
        return len(self._tokens) * self._tokens.itemsize

    def propose(self, proposal: Proposal) -> None:
        """Note the last proposal, against which the next commit is compared."""
        self._proposal = proposal

    def extend(self, tokens: Int32) -> None:
        """Add committed tokens; those that the last proposal began with are an accepted run."""
        start = len(self._tokens)
        if self._proposal is not None:
            length = _agreed(self._proposal, tokens)
            if length and start + length <= MAX_TOKENS:
                self._accepted.append((start, start + length))
        self._proposal = None
        self._tokens.extend(tokens.tolist())
        del self._tokens[MAX_TOKENS:]

    def end(self) -> Ended | None:
        """The text and its accepted runs, to be learned; None if there is no answer."""
        if len(self._tokens) <= self._answer_start:
            return None
        tokens = np.array(self._tokens, dtype=np.int32)
        return Ended(self._namespace, tokens, tuple(self._accepted))


def _agreed(proposal: Proposal, tokens: Int32) -> int:
    """Number of the first tokens that are a path of the proposal."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(
            zip(proposal.parents.tolist(), proposal.tokens.tolist(), strict=True)
        )
    }
    node = ROOT
    for length, token in enumerate(tokens.tolist()):
        child = children.get((node, token))
        if child is None:
            return length
        node = child
    return len(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalOptions:
    """Options of `RetrievalDrafter`; raises `ConfigError` naming the option.

    context_len    how many of the last tokens are looked up
    max_nodes      most nodes of a proposal
    min_match_len  shorter matches are not proposed
    rule           "smoothed", or "rest": the longest match alone, the most frequent prefixes of
                   what follows its first 5,000 occurrences
    max_depth      longest continuation
    coupled        with a temperature: continuations are ranked with the request's noise, too
    oversample     if so: so many times the nodes are looked up, since the noise may raise a
                   continuation that is rare in the store
    learn          hand ended requests to the store, for later ones of their namespace; never those
                   of `shared`, with a cache salt or with `store: false`
    """

    # These are fixed: users have no better values.
    FIXED: ClassVar[tuple[str, ...]] = (
        "context_len",
        "min_match_len",
        "rule",
        "coupled",
        "oversample",
    )

    context_len: int = 16
    max_nodes: int = 24
    min_match_len: int = 2
    rule: str = SMOOTHED
    max_depth: int = 16
    coupled: bool = True
    oversample: int = 4
    learn: bool = False

    def __post_init__(self) -> None:
        require_whole("context_len", self.context_len, 1, 64)
        require_whole("max_nodes", self.max_nodes, 1, 4096)
        require_whole("min_match_len", self.min_match_len, 1, self.context_len)
        require_whole("max_depth", self.max_depth, 1, 16)
        require_whole("oversample", self.oversample, 1, 64)
        require_switches(self, "coupled", "learn")
        if self.rule not in (SMOOTHED, REST):
            raise ConfigError("rule", f"must be {SMOOTHED!r} or {REST!r}, not {self.rule!r}")


class RetrievalDrafter:
    """Proposes what a lookup knows, ranked by its counts and the request's sampling noise.

    Keeps the last `context_len` tokens of each request, and of requests that are to be learned
    their answers, too. What the lookup raises comes out of `propose`.
    """

    def __init__(
        self,
        lookup: Lookup,
        name: str = "retrieval",
        options: RetrievalOptions | None = None,
        learner: Learner | None = None,
        free: Callable[[], None] = lambda: None,
    ) -> None:
        """`free` frees what lookup and learner hold."""
        self._lookup = lookup
        self._free = free
        self._name = name
        self._options = options or RetrievalOptions()
        self._learner = learner if self._options.learn else None
        self._refused: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._requests: OpenRequests[_Request] = OpenRequests(name)

    @property
    def name(self) -> str:
        """The `source` of the proposals."""
        return self._name

    @property
    def memory_bytes(self) -> int:
        """About the bytes that the open requests take."""
        return self._requests.memory_bytes

    @property
    def learning_counts(self) -> Mapping[str, int]:
        """Ended requests by outcome, all outcomes of `core.interfaces.OUTCOMES` among them."""
        if self._learner is None:
            return {}
        learned = self._learner.counts
        counts = {name: self._refused[name] + learned.get(name, 0) for name in OUTCOMES}
        return counts | {name: learned.get(name, 0) for name in (CREDITED, DAMAGED)}

    def open(self, request: DraftRequest) -> None:
        """Begin a request. Raises `DrafterError` if it has no token."""
        state = _Request(request, self._options.context_len)
        if self._learner is not None:
            state.refusal = refusal(request)
            if state.refusal is None:
                state.answer = LearnedAnswer(request)
        self._requests.put(request.request_id, state)

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:  # noqa: ARG002
        """One proposal a query, from one lookup of all."""
        states = [self._requests.of_query(query) for query in queries]
        proposals = [empty_proposal(self._name) for _ in queries]
        budgets = [min(query.max_nodes, self._options.max_nodes) for query in queries]
        asked = [index for index, budget in enumerate(budgets) if budget > 0]
        if not asked:
            return proposals
        subtrees = self._lookup.lookup(
            [states[index].context_behind(queries[index].assumed) for index in asked],
            [states[index].namespace for index in asked],
            [self._num_candidates(states[index], budgets[index]) for index in asked],
        )
        for index, subtree in zip(asked, subtrees, strict=True):
            if subtree.match_len >= self._options.min_match_len:
                choice = states[index].choice_behind(queries[index].assumed)
                proposals[index] = self._rank(choice, subtree, budgets[index])
        for state, query, proposal in zip(states, queries, proposals, strict=True):
            if state.answer is not None and not query.assumed:
                state.answer.propose(proposal)
        return proposals

    def observe(self, commits: Sequence[Commit]) -> None:
        """Append the committed tokens to their requests' contexts and answers."""
        for commit in commits:
            self._requests.of_commit(commit).extend(commit.tokens)

    def close(self, request_id: str) -> None:
        """Forget a request, or hand it on to be learned; an unknown id is ignored."""
        state = self._requests.drop(request_id)
        if self._learner is None or state is None:
            return
        if state.refusal is not None:
            self._refused[state.refusal] += 1
        ended = None if state.answer is None else state.answer.end()
        if ended is not None:
            self._learner.learn(ended)

    def free(self) -> None:
        """Free what lookup and learner hold; what waits to be learned is learned first."""
        self._free()

    def _num_candidates(self, state: _Request, max_nodes: int) -> int:
        is_ranked = self._options.coupled and state.temperature > 0
        return max_nodes * self._options.oversample if is_ranked else max_nodes

    def _rank(self, choice: CoupledChoice, subtree: Subtree, max_nodes: int) -> Proposal:
        nodes = (subtree.tokens, subtree.parents, subtree.log_probs)
        if not self._options.coupled:
            choice = replace(choice, temperature=0.0)
        # Without noise they stand in their order already.
        if not choice.temperature and len(subtree.tokens) <= max_nodes:
            return Proposal(self._name, *nodes)
        return Proposal(self._name, *rank_coupled(*nodes, choice, max_nodes))


class _Request:
    """The end of one request's text, and how its tokens are chosen."""

    __slots__ = (
        "answer", "committed_len", "context", "context_len", "namespace", "refusal", "seed",
        "temperature",
    )  # fmt: skip

    def __init__(self, request: DraftRequest, context_len: int) -> None:
        self.answer: LearnedAnswer | None = None
        self.refusal: str | None = None
        self.context: Int32 = request.token_ids[-context_len:].astype(np.int32)
        self.context_len = context_len
        self.committed_len = len(request.token_ids)
        self.namespace = request.namespace
        self.temperature = request.temperature
        self.seed = request.seed

    @property
    def memory_bytes(self) -> int:
        return self.context.nbytes + (0 if self.answer is None else self.answer.memory_bytes)

    def context_behind(self, assumed: Sequence[int] | None) -> Int32:
        """The context with these tokens behind it."""
        if not assumed:
            return self.context
        added = np.array(assumed, dtype=np.int32)
        return np.concatenate([self.context, added])[-self.context_len :]

    def choice_behind(self, assumed: Sequence[int] | None) -> CoupledChoice:
        """How the token behind the text and these is chosen."""
        return CoupledChoice(self.temperature, self.seed, self.committed_len + len(assumed or ()))

    def extend(self, tokens: Int32) -> None:
        self.context = np.concatenate([self.context, tokens])[-self.context_len :]
        self.committed_len += len(tokens)
        if self.answer is not None:
            self.answer.extend(tokens)
