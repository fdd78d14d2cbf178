"""Where a stage runs, and how hidden states can travel between such places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.errors import ConfigError

if TYPE_CHECKING:
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
