"""How a coordinator reaches stages in other processes, and they each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ray.actor import ActorHandle

from ...core.steps import StepInput
from .in_flight import InFlightSteps


class StageTransport(Protocol):
    """Carries steps to the first stage, hidden states between stages, answers back.

    Owned by a `RayPipeline`, which starts and kills the actors (`StageWorker`).
    """

    @property
    def leaves_stages_idle(self) -> bool:
        """Whether stages that live are free for another run once this side is closed."""
        ...

    async def meet(self, stages: Sequence[ActorHandle], seconds: float) -> None:
        """Connect neighbours, before they load what fills their memory; within that time.

        Raises `StageLost`, or a `RayTaskError` of it, that names two that do not reach one another.
        """
        ...

    async def open(self, stages: Sequence[ActorHandle], steps: InFlightSteps) -> None:
        """Connect built stages. From then on `steps` hears of answers and of losses."""
        ...

    def send(self, sequence: int, step: StepInput) -> None:
        """Send a step to the stages; does not wait for them. A failure goes to `steps`.

        Raises `ProtocolError`, and sends nothing, where the step has no encoding.
        """
        ...

    async def close(self) -> None:
        """Free everything on this side, in bounded time; the actors were killed before."""
        ...
