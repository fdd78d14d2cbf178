"""A cheaper drafter that guesses what a model will draw, so that one pass makes several draws.

The vertical cascade of Cascade Speculative Drafting (Chen et al., arXiv 2312.11462). Its guesses
are compared with the model's own draws, so these are what they would be without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.arrays import ROOT
from ...core.interfaces import Drafter
from ...core.proposals import Proposal, Query
from ..model.chain_job import ChainJob

# With more than that to feed a text is being read, which is done in as few passes without guesses.
MOST_PENDING = 16


@dataclass(frozen=True, slots=True)
class Helper:
    """Guesses up to `num_tokens` draws of each chain; `drafter` answers behind assumed tokens."""

    drafter: Drafter
    num_tokens: int

    def hint(self, queries: Sequence[Query], jobs: Sequence[ChainJob]) -> None:
        """See `HintSource`."""
        asked: list[tuple[Query, ChainJob]] = []
        for query, job in zip(queries, jobs, strict=True):
            # The draw behind the last guess is one, too.
            room = min(self.num_tokens, job.limit - len(job.drawn) - 1)
            takes_hints = job.tree is None and not job.hints and len(job.pending) <= MOST_PENDING
            if room > 0 and takes_hints and not job.is_done:
                assumed = (*(query.assumed or ()), *job.drawn)
                asked.append((query._replace(max_nodes=room, assumed=assumed), job))
        if asked:
            proposals = self.drafter.propose([query for query, _ in asked])
            for (query, job), proposal in zip(asked, proposals, strict=True):
                job.hint(first_path(proposal)[: query.max_nodes])


def first_path(proposal: Proposal) -> list[int]:
    """The tokens from the root down, by the first node of each level that follows the last one."""
    path: list[int] = []
    last = ROOT
    pairs = zip(proposal.parents.tolist(), proposal.tokens.tolist(), strict=True)
    for node, (parent, token) in enumerate(pairs):
        if parent == last:
            path.append(token)
            last = node
    return path
