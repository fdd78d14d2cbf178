"""What runs in the process of a remote stage, and what it tells of where it is."""

from __future__ import annotations

import importlib
import os
import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import ray

from ...core.errors import ConfigError, StageLost
from ...core.interfaces import StageMemory
from .messages import load_loops
from .stage_spec import StageRunner, StageSpec

if TYPE_CHECKING:
    from .distributed_stage import DistributedStage, StageLink, StageRow
    from .hidden_link import Backend


@dataclass(frozen=True, slots=True)
class StagePlace:
    """What a stage's worker tells of where it is.

    node, address  id and IP address of its Ray node
    gpu            the GPU that it computes on, where NCCL can use it; else None
    pid            of its process
    """

    node: str
    address: str
    gpu: str | None = None
    pid: int = 0


class StageSizes(NamedTuple):
    """What a stage's worker tells of its stage: the KV blocks of its cache, and what it keeps."""

    num_blocks: int
    memory: StageMemory


def fastest_backend(places: Sequence[StagePlace]) -> Backend:
    """NCCL where every stage has a GPU of its own: it refuses two ranks on one GPU."""
    return "gloo" if len(places) == 1 or _without_own_gpu(places) else "nccl"


def check_nccl(places: Sequence[StagePlace]) -> None:
    """Raises `ConfigError` where stages cannot reach one another by NCCL."""
    if missing := _without_own_gpu(places):
        stages = ", ".join(map(str, missing))
        raise ConfigError(
            "stage_transport",
            f"nccl needs a GPU of its own for every stage, and NCCL in torch; stage {stages} has "
            "none. auto takes nccl where it can",
        )


def _without_own_gpu(places: Sequence[StagePlace]) -> list[int]:
    gpus = [place.gpu for place in places]
    return [index for index, gpu in enumerate(gpus) if gpu is None or gpu in gpus[:index]]


class StageWorker:
    """One stage and the loops that feed it. Made an actor by `actors/kept_actors.py`.

    A worker begins without a stage, so that its process can wait with its imports done until one
    is needed. One coordinator at a time drives it: `settle` cuts the one before off.
    """

    def __init__(self) -> None:
        self._index = 0
        self._assigned: tuple[int, StageSpec] | None = None
        self._spec: StageSpec | None = None
        self._stage: StageRunner | None = None
        self._distributed: DistributedStage | None = None
        self._is_serving = threading.Lock()
        # transformers cannot be imported by two threads at once: one may see half of it.
        self._importing = threading.Lock()

    def prepare(self) -> None:
        """Import what a stage needs, which takes far longer than to load a small one."""
        with self._importing:
            importlib.import_module("...models.stage.load_stage", __package__)
            importlib.import_module(".distributed_stage", __package__)

    def assign(self, index: int, packed: bytes) -> StagePlace:
        """Say which stage it shall be; returns where that is. `meet` and `build` come next.

        `packed`: its `StageSpec`, pickled by the coordinator. To unpickle it imports what `prepare`
        does, so Ray may not do that by itself, beside it.
        """
        with self._importing:
            import torch  # noqa: F401, PLC0415 - as above

            spec: StageSpec = pickle.loads(packed)
        self._assigned = index, spec
        self._distributed = None
        node = ray.get_runtime_context().get_node_id()
        gpu = _nccl_gpu(spec.device)
        return StagePlace(node, ray.util.get_node_ip_address(), gpu, os.getpid())

    def open_store(self, host: str) -> int:
        """Serve the rendezvous of the stages; returns the port. First stage only."""
        return self._new_distributed().open_store(host)

    def meet(self, row: StageRow) -> None:
        """Connect with the neighbours, before the stage fills the memory that this takes.

        Raises `StageLost` where one does not come.
        """
        (self._distributed or self._new_distributed()).meet(row)

    def build(self) -> None:
        """Load the assigned stage, or empty the KV cache of the same one."""
        import torch  # noqa: PLC0415

        assert self._assigned is not None
        index, spec = self._assigned
        if spec.device == "cpu":
            # Stages of one machine run at once; more threads than cores slow all of them down.
            torch.set_num_threads(max(1, int(spec.num_cpus)))
        load_loops()
        if self._stage is not None and self._is_same(self._stage, index, spec):
            self._stage.reset()
        else:
            self._stage = None  # before the new one needs its memory
            self._stage = spec.build()
        self._index, self._spec = index, spec

    def sizes(self) -> StageSizes:
        """Of the stage that was built."""
        assert self._stage is not None, "its sizes come after build"
        return StageSizes(self._stage.num_blocks, self._stage.memory)

    def settle(self, timeout_s: float) -> bool:
        """Disconnect the coordinator; whether the stage is idle within `timeout_s`.

        A stage that computes, or waits for a neighbour, is not idle before it is done with that.
        """
        if self._distributed is not None:
            self._distributed.cut_off()
        if not self._is_serving.acquire(timeout=timeout_s):
            return False
        self._is_serving.release()
        return True

    def serve(self, link: StageLink) -> None:
        """Run steps that come by `link` until the coordinator closes it. Raises `StageLost`."""
        distributed = self._distributed
        assert self._stage is not None, "serve comes after build"
        assert distributed is not None, "serve comes after meet"
        if not self._is_serving.acquire(blocking=False):
            raise StageLost(f"stage {self._index} is driven by another coordinator")
        try:
            distributed.serve(self._stage, link)
        finally:
            self._is_serving.release()

    def _is_same(self, stage: StageRunner, index: int, spec: StageSpec) -> bool:
        """Whether it is the stage of `spec`, whose cache may have been sized by itself."""
        if self._spec is None or index != self._index:
            return False
        has_room = spec.num_blocks is not None and stage.num_blocks >= spec.num_blocks
        return has_room and spec == replace(self._spec, num_blocks=spec.num_blocks)

    def _new_distributed(self) -> DistributedStage:
        # It imports torch, which a worker that waits for its first stage does beforehand.
        from .distributed_stage import DistributedStage  # noqa: PLC0415

        assert self._assigned is not None
        self._distributed = DistributedStage(*self._assigned)
        return self._distributed


def _nccl_gpu(device: str) -> str | None:
    """The name that a GPU has in all processes of all nodes, where NCCL can use it."""
    import torch  # noqa: PLC0415

    if torch.device(device).type != "cuda" or not torch.distributed.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)
