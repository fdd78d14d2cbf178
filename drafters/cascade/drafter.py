"""A cascade: drafters that write a chain one behind the other, the best one first.

Cascade Speculative Drafting (Chen et al., arXiv 2312.11462): horizontal, since later tokens of a
draft are less probable to be accepted, they are left to cheaper drafters; vertical, a better
drafter is itself sped up by cheaper ones (`helper.py`). See docs/algorithms/drafters.md, "Cascade".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...core.interfaces import ChatReader, Drafter, PassCounter
from ...core.proposals import (
    Commit,
    DraftDistributions,
    DraftRequest,
    Proposal,
    Query,
    chain_proposal,
    empty_proposal,
)


class CascadeDrafter:
    """Proposes one chain a query, of as many tokens of each of its drafters as it is told."""

    def __init__(self, name: str, drafters: Sequence[Drafter], lengths: Sequence[int]) -> None:
        """Each of `drafters` writes its number of tokens, in `lengths`, behind those before it."""
        self._name = name
        self._drafters = tuple(drafters)
        self._lengths = tuple(lengths)
        # See `PassCounter`.
        self.num_passes = 0

    @property
    def name(self) -> str:
        """The `source` of the proposals."""
        return self._name

    @property
    def memory_bytes(self) -> int:
        """About the bytes that all of its drafters keep."""
        return sum(drafter.memory_bytes for drafter in self._drafters)

    @property
    def reads_chat(self) -> bool:
        """Whether any of its drafters makes prompts of chats by a template of its own."""
        return any(one.reads_chat for one in self._drafters if isinstance(one, ChatReader))

    def open(self, request: DraftRequest) -> None:
        """Begin a request with each. Raises `DrafterError` without a token."""
        for drafter in self._drafters:
            drafter.open(request)

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        """A chain a query. Raises `DrafterError` if a query does not fit the state."""
        chains: list[list[Proposal]] = [[] for _ in queries]
        for drafter, length in zip(self._drafters, self._lengths, strict=True):
            asked: list[Query] = []
            places: list[int] = []
            for place, (query, parts) in enumerate(zip(queries, chains, strict=True)):
                path = [token for part in parts for token in part.tokens.tolist()]
                room = min(length, query.max_nodes - len(path))
                if room > 0 or not parts:
                    assumed = (*(query.assumed or ()), *path) if parts else query.assumed
                    asked.append(query._replace(max_nodes=max(room, 0), assumed=assumed))
                    places.append(place)
            if length and asked:
                for place, part in zip(places, drafter.propose(asked, deadline), strict=True):
                    chains[place].append(part)
        counters = (one for one in self._drafters if isinstance(one, PassCounter))
        self.num_passes = sum(counter.num_passes for counter in counters)
        return [self._joined(parts) for parts in chains]

    def observe(self, commits: Sequence[Commit]) -> None:
        """Tell each what was committed. Raises `DrafterError` for a commit that does not fit."""
        for drafter in self._drafters:
            drafter.observe(commits)

    def close(self, request_id: str) -> None:
        """Forget a request; an unknown id is ignored."""
        for drafter in self._drafters:
            drafter.close(request_id)

    def _joined(self, parts: Sequence[Proposal]) -> Proposal:
        if not any(len(part.tokens) for part in parts):
            return empty_proposal(self._name)
        chain = chain_proposal(
            self._name,
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.log_probs for part in parts]),
        )
        return replace(chain, distributions=_declared(parts))


def _declared(parts: Sequence[Proposal]) -> DraftDistributions | None:
    """What all nodes were drawn from; rows of zeros where a drafter declares nothing."""
    widths = [
        0 if part.distributions is None else part.distributions.ids.shape[1] for part in parts
    ]
    if not any(widths):
        return None
    shape = sum(len(part.tokens) for part in parts), max(widths)
    ids, probs = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32)
    first = 0
    for part, width in zip(parts, widths, strict=True):
        end = first + len(part.tokens)
        if part.distributions is not None:
            ids[first:end, :width] = part.distributions.ids
            probs[first:end, :width] = part.distributions.probs
        first = end
    return DraftDistributions(ids, probs)
