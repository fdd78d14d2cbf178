"""What the engine needs of the parts around it; `cluster/` implements it."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Protocol

from .proposals import DraftRequest, Proposal, Query, StepCommit
from .steps import StepInput, StepOutput


class StepPipeline(Protocol):
    """The part of a pipeline that the engine uses (`cluster/transport/stage_spec.py`)."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be submitted and not yet answered."""
        ...

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """Send a step; raises, or its awaitable does, `StageError` or `StageLost`."""
        ...


class ProposalSource(Protocol):
    """The engine's only access to drafters (`cluster/drafting/hub.py`). Never raises."""

    def open(self, request: DraftRequest) -> None:
        """Begin a request with every drafter."""
        ...

    def close(self, request_id: str, last: Sequence[StepCommit] = ()) -> None:
        """End a request with every drafter, after its `last` commits."""
        ...

    async def exchange(
        self,
        commits: Sequence[StepCommit],
        queries: Sequence[Query],
        left_out: Collection[str] = (),
    ) -> Mapping[str, Sequence[Proposal]]:
        """Tell what was committed, ask for proposals; by request id, in order of priority.

        The drafters `left_out` get the commits only.
        """
        ...

    def costs(self) -> Mapping[str, float]:
        """Seconds that each drafter takes in a step, by name."""
        ...
