"""Where a pipeline gets the processes of its stages from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ray.actor import ActorHandle

from ..transport.stage_spec import StageSpec


@dataclass(frozen=True, slots=True)
class TakenStage:
    """A worker (`StageWorker`) for one stage.

    is_kept  it ran the same stage before and has its weights still; it may hang, as any process
             whose last coordinator is gone
    """

    worker: ActorHandle
    is_kept: bool


class StageSource(Protocol):
    """Workers for stages: kept ones, spare ones that wait, or new ones. Used on one event loop."""

    async def take(self, index: int, spec: StageSpec) -> TakenStage:
        """A worker for this stage, which may still be starting. Nobody else gets it."""
        ...

    async def drop(self, worker: ActorHandle) -> None:
        """Kill a worker, whatever it does."""
        ...

    def replenish(self) -> None:
        """Start spare workers in the place of those that were taken; does not wait."""
        ...
