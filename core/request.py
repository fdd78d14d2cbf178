"""One request: what was asked, and where its answer stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .errors import DraftlineError
from .output import Delta, RequestMetrics
from .sampling_params import SamplingParams
from .stop import StopRule
from .tree import TokenTree
from .types import DraftRequest, Int32

# Gets every delta of a request in order, or the error that ends it.
Sink = Callable[[Delta | DraftlineError], None]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A validated request. `seed` is the resolved one; `max_tokens` fits the context."""

    request_id: str
    prompt_ids: Int32
    params: SamplingParams
    seed: int
    max_tokens: int
    sink: Sink
    namespace: str = "shared"
    speculative: bool = True


@dataclass(slots=True, eq=False)
class RequestState:
    """The only mutable state of a running request.

    token_ids      committed tokens, prompt included
    num_scheduled  positions that were submitted to be cached; prompt chunks may be in flight
    blocks         KV blocks, in position order; scratch slots of tree nodes follow the committed
    in_flight      steps of this request that were submitted and not committed yet
    moves          KV copies of the last commit, to be sent with this request's next step
    """

    request: Request
    stop: StopRule
    blocks: list[int]
    arrival_time: float
    token_ids: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    in_flight: int = 0
    moves: list[tuple[int, int]] = field(default_factory=list)
    first_token_time: float = 0.0
    num_draft_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.token_ids = self.request.prompt_ids.tolist()

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens that no step has taken yet."""
        return max(0, self.prompt_len - self.num_scheduled)

    @property
    def is_decoding(self) -> bool:
        """Whether the next step verifies a tree: the prompt is cached and a first token known."""
        return len(self.token_ids) > self.prompt_len

    def draft_request(self) -> DraftRequest:
        """What drafters learn of the request now."""
        params = self.request.params
        return DraftRequest(
            request_id=self.request_id,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            prompt_len=self.prompt_len,
            temperature=params.temperature,
            seed=self.request.seed,
            namespace=self.request.namespace,
        )

    def record_walk(self, tree: TokenTree, path: list[int]) -> None:
        """Count one verification step."""
        self.num_draft_tokens += len(tree)
        self.drafted_by_source.update(tree.sources)
        self.accepted_lengths.append(len(path))
        self.accepted_by_source.update(tree.sources[node] for node in path)

    def metrics(self, now: float) -> RequestMetrics:
        """Counts and times at the request's end."""
        return RequestMetrics(
            prompt_tokens=self.prompt_len,
            generated_tokens=len(self.token_ids) - self.prompt_len,
            num_steps=len(self.accepted_lengths),
            num_draft_tokens=self.num_draft_tokens,
            drafted_by_source=dict(self.drafted_by_source),
            accepted_by_source=dict(self.accepted_by_source),
            accepted_lengths=tuple(self.accepted_lengths),
            arrival_time=self.arrival_time,
            first_token_time=self.first_token_time,
            finish_time=now,
        )
