"""What runs in the process of a remote stage, whatever carries its steps."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING

import ray

from ..core.errors import DeviceLost, StageError
from ..core.types import StepInput, StepOutput
from .distributed_stage import DistributedStage, StageLink
from .pipeline import StageRunner, StageSpec, run_stage
from .stage_failure import end_process
from .stage_place import StagePlace
from .stage_spans import Spans, run_traced

if TYPE_CHECKING:
    import torch

    # What stages hand on: hidden states, with the spans of the stages so far for a traced step.
    Carried = torch.Tensor | tuple[torch.Tensor, Spans]

# An empty payload warms a transport up: it passes through all stages without a step.
WARM_UP = b""


class StageWorker:
    """One stage and the loops that feed it. Made an actor by `actors/stage_actor.py`."""

    def __init__(self, index: int, spec: StageSpec) -> None:
        self._index = index
        self._spec = spec
        self._stage: StageRunner | None = None
        self._distributed: DistributedStage | None = None

    def build(self) -> StagePlace:
        """Load the stage; returns where it is."""
        import torch  # noqa: PLC0415

        if self._spec.device == "cpu":
            # Stages of one machine run at once; more threads than cores slow all of them down.
            torch.set_num_threads(max(1, int(self._spec.num_cpus)))
        self._stage = self._spec.build()
        node = ray.get_runtime_context().get_node_id()
        return StagePlace(node, ray.util.get_node_ip_address(), _nccl_gpu(self._spec.device))

    def num_blocks(self) -> int:
        """KV blocks of the stage that was built."""
        assert self._stage is not None, "its size comes after build"
        return self._stage.num_blocks

    def watch(self) -> None:
        """Never returns: the call fails in the moment that this process dies."""
        threading.Event().wait()

    def run_payload(
        self, payload: bytes, carried: Carried | StageError | None = None
    ) -> Carried | StageError | bytes | None:
        """One step of a compiled graph, pickled; the answer of the last stage is pickled too.

        A failure travels on in the place of the hidden states.
        """
        result = carried if isinstance(carried, StageError) else self._run(payload, carried)
        if self._spec.span.is_last:
            return pickle.dumps(result)
        assert not isinstance(result, StepOutput), "only the last stage answers"
        return result

    def open_store(self, host: str) -> int:
        """Serve the rendezvous of the stages; returns the port. First stage only."""
        self._distributed = DistributedStage(self._index, self._spec)
        return self._distributed.open_store(host)

    def serve(self, link: StageLink) -> None:
        """Run steps that come by `link` until the coordinator closes it."""
        assert self._stage is not None, "serve comes after build"
        distributed = self._distributed or DistributedStage(self._index, self._spec)
        distributed.serve(self._stage, link)

    def _run(
        self, payload: bytes, carried: Carried | None
    ) -> Carried | StepOutput | StageError | None:
        if payload == WARM_UP:
            return None
        assert self._stage is not None, "steps come after build"
        step: StepInput = pickle.loads(payload)
        hidden, spans = carried if isinstance(carried, tuple) else (carried, ())
        try:
            if not step.is_traced:
                return run_stage(self._index, self._stage, step, hidden)
            result, spans = run_traced(self._index, self._stage, step, hidden, spans)
        except StageError as error:
            return error
        except DeviceLost:
            # Whoever watches this process learns of it and replaces it.
            end_process()
        return result if isinstance(result, StepOutput) else (result, spans)


def _nccl_gpu(device: str) -> str | None:
    """The name that a GPU has in all processes of all nodes, where NCCL can use it."""
    import torch  # noqa: PLC0415

    if torch.device(device).type != "cuda" or not torch.distributed.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)
