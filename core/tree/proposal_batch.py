"""The proposals of one drafter for several requests, as one set of flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np

from ..arrays import ROOT, Float32, Int32, Int64
from ..compiled import compiled
from ..errors import ProtocolError
from ..proposals import LOG_PROB_SLACK, MAX_PROPOSAL_NODES, Probe, Proposal

# What may be wrong with a proposal.
FITS, TOO_LONG, BAD_TOKEN, BAD_PARENT, BAD_LOG_PROB = range(5)
REASONS = {
    TOO_LONG: f"more than {MAX_PROPOSAL_NODES} nodes",
    BAD_TOKEN: "token id outside the vocabulary",
    BAD_PARENT: "a parent does not precede its child",
    BAD_LOG_PROB: "a log-probability is above 0 or NaN",
}


@dataclass(frozen=True, slots=True, eq=False)
class ProposalBatch(Sequence[Proposal]):
    """Proposals, one behind the other; each is made when it is asked for.

    tokens, parents, log_probs  as in `Proposal`; parents are counted from their proposal's first
    ends                        int64 [proposals]  where each ends
    probes                      of each proposal; none at all where no proposal has one
    """

    source: str
    tokens: Int32
    parents: Int32
    log_probs: Float32
    ends: Int64
    probes: Sequence[Probe | None] = ()
    _ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        # Each of them is asked for: numbers of an array would be made one by one.
        object.__setattr__(self, "_ends", self.ends.tolist())

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Proposal: ...

    @overload
    def __getitem__(self, index: slice) -> list[Proposal]: ...

    def __getitem__(self, index: int | slice) -> Proposal | list[Proposal]:
        if isinstance(index, slice):
            return [self[own] for own in range(len(self))[index]]
        index = index if index >= 0 else range(len(self))[index]
        own = slice(self._ends[index - 1] if index else 0, self._ends[index])
        probe = self.probes[index] if self.probes else None
        arrays = self.tokens[own], self.parents[own], self.log_probs[own]
        return Proposal(self.source, *arrays, probe)

    def check(self, vocab_size: int) -> None:
        """Raise `ProtocolError` as `Proposal.check` does for each of them."""
        arrays = self.tokens, self.parents, self.log_probs
        dtypes = [array.dtype for array in (*arrays, self.ends)]
        count = int(self.ends[-1]) if len(self.ends) else 0
        if dtypes != [np.int32, np.int32, np.float32, np.int64]:
            raise ProtocolError(f"proposals of {self.source}: arrays of another type")
        if any(array.shape != (count,) for array in arrays):
            raise ProtocolError(f"proposals of {self.source}: arrays differ in shape")
        fault = fault_of(*arrays, self.ends, vocab_size)
        if fault != FITS:
            raise ProtocolError(f"proposal of {self.source}: {REASONS[fault]}")


@compiled
def fault_of(
    tokens: Int32, parents: Int32, log_probs: Float32, ends: Int64, vocab_size: int
) -> int:
    """What is wrong with the first proposal that does not fit; FITS where all do."""
    first = 0
    for end in ends:
        if not 0 <= end - first <= MAX_PROPOSAL_NODES or end > len(tokens):
            return TOO_LONG
        for node in range(first, end):
            if not 0 <= tokens[node] < vocab_size:
                return BAD_TOKEN
            if not ROOT <= parents[node] < node - first:
                return BAD_PARENT
            # A NaN fails every comparison.
            if not log_probs[node] <= LOG_PROB_SLACK:
                return BAD_LOG_PROB
        first = end
    return FITS


def num_right(draft: Proposal, tokens: Int32) -> int:
    """How many of the tokens int32 [n] that followed the text are a path of the draft."""
    at, count = ROOT, 0
    for token in tokens.tolist():
        following = (draft.parents == at) & (draft.tokens == token)
        if not following.any():
            break
        at, count = int(following.argmax()), count + 1
    return count
