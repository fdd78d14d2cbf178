"""What a drafter may do before it counts as failed, and what its answers must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.errors import ProtocolError
from ...core.proposals import Probe, Proposal
from ...core.tree.proposal_batch import ProposalBatch
from ..links.failures import RetryPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLimits:
    """Limits of every drafter.

    vocab_size        token ids stay below
    answer_timeout_s  in another process: a message unanswered for so long counts as a failure
    max_backlog       in another process: ended requests and their last commits that wait for a
                      drafter that learns from them
    max_probe_rows    most rows, offset and top_k of a probe
    retry             when one that failed is asked again
    """

    vocab_size: int
    answer_timeout_s: float = 2.0
    max_backlog: int = 1024
    max_probe_rows: int = 256
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def check(self, proposals: Sequence[Proposal], num_queries: int, source: str) -> None:
        """Raise `ProtocolError` unless these answer so many queries to `source`.

        What is no proposal at all may raise anything.
        """
        if len(proposals) != num_queries:
            raise ProtocolError(f"{len(proposals)} proposals for {num_queries} queries")
        if isinstance(proposals, ProposalBatch):
            if proposals.source != source:
                raise ProtocolError(f"proposals of {proposals.source!r}")
            proposals.check(self.vocab_size)
            for probe in proposals.probes:
                self._check_probe(probe)
            return
        for proposal in proposals:
            if proposal.source != source:
                raise ProtocolError(f"a proposal of {proposal.source!r}")
            proposal.check(self.vocab_size)
            self._check_probe(proposal.probe)

    def _check_probe(self, probe: Probe | None) -> None:
        if probe is not None:
            probe.check(self.vocab_size, self.max_probe_rows)
