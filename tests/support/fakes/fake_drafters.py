"""Drafters without a model, whose every proposal is known beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from draftline.core.errors import DrafterError
from draftline.core.proposals import (
    Commit,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    Probe,
    Proposal,
    Query,
    chain_proposal,
)

VOCAB_SIZE = 50


class CountingDrafter:
    """Proposes last token + 1, + 2, ... modulo the vocabulary; refuses queries that do not fit.

    So a test that knows the text knows the proposal, and a drafter that missed a commit raises.
    """

    def __init__(self, name: str = "counting", num_tokens: int = 4) -> None:
        self.name = name
        self.num_tokens = num_tokens
        self.texts: dict[str, list[int]] = {}
        self.commits: list[Commit] = []
        self.opened: list[DraftRequest] = []

    @property
    def memory_bytes(self) -> int:
        return 4 * sum(map(len, self.texts.values()))

    def open(self, request: DraftRequest) -> None:
        self.opened.append(request)
        self.texts[request.request_id] = request.token_ids.tolist()

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        del deadline
        return [self.propose_one(query) for query in queries]

    def propose_one(self, query: Query) -> Proposal:
        text = self.texts.get(query.request_id)
        if text is None or len(text) != query.committed_len:
            raise DrafterError(f"request {query.request_id} is not as long as the query says")
        last = query.assumed[-1] if query.assumed else text[-1]
        return chain_proposal(self.name, following(last, min(self.num_tokens, query.max_nodes)))

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            text = self.texts[commit.request_id]
            if len(text) != commit.base_len:
                raise DrafterError(f"commit of {commit.request_id} does not continue its text")
            text.extend(commit.tokens.tolist())
        self.commits.extend(commits)

    def close(self, request_id: str) -> None:
        self.texts.pop(request_id, None)


class ScriptedDrafter(CountingDrafter):
    """Calls `script(query)` for each proposal: it may return nonsense or raise."""

    def __init__(self, script: Callable[[Query], object], name: str = "scripted") -> None:
        super().__init__(name)
        self.script = script

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        del deadline
        return [self.script(query) for query in queries]  # pyright: ignore[reportReturnType]


class SlowDrafter(CountingDrafter):
    """Takes `delay_s` for every `propose`."""

    def __init__(self, delay_s: float, name: str = "slow", num_tokens: int = 8) -> None:
        super().__init__(name, num_tokens)
        self.delay_s = delay_s

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        time.sleep(self.delay_s)
        return super().propose(queries, deadline)


class ProbingDrafter(CountingDrafter):
    """Sends a probe of two rows with every proposal."""

    def propose_one(self, query: Query) -> Proposal:
        plain = super().propose_one(query)
        rows = np.array([1, 2], dtype=np.int32)
        mask = np.tri(2, dtype=np.bool_)
        probe = Probe(rows, rows, mask, np.array([1], dtype=np.int32), 2)
        return Proposal(plain.source, plain.tokens, plain.parents, plain.log_probs, probe)


class FeatureReader(CountingDrafter):
    """Reads features of `feature_layers`: keeps all that it is given, by request."""

    def __init__(self, feature_layers: FeatureLayers, name: str = "reading") -> None:
        super().__init__(name)
        self.feature_layers = feature_layers
        self.features: dict[str, list[FeatureRows]] = {}

    def open(self, request: DraftRequest) -> None:
        super().open(request)
        self.features[request.request_id] = []

    def observe_features(self, rows: Sequence[FeatureRows]) -> None:
        for own in rows:
            # Before the commit of these tokens, or of the prompt's.
            assert own.position <= len(self.texts[own.request_id])
            self.features[own.request_id].append(own)


def following(token: int, count: int) -> np.ndarray:
    """The `count` tokens after `token`, int32."""
    return ((token + 1 + np.arange(count)) % VOCAB_SIZE).astype(np.int32)
