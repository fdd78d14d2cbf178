"""Places that Ray keeps free for actors, and the GPUs of this process's Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)


def cluster_has_gpus() -> bool | None:
    """Whether Ray has a GPU to give; None where Ray does not run yet."""
    return ray.cluster_resources().get("GPU", 0) > 0 if ray.is_initialized() else None


ANY = -1


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle of a placement group; index -1 is any that has room."""

    group: PlacementGroup
    index: int = ANY


def replica_bundles(group: PlacementGroup, num_stages: int, num_drafters: int) -> list[Bundle]:
    """Where the stages and then the drafters of a replica go.

    Its group holds one bundle for the coordinator and then one for each of them
    (`deploy/ray_serve/deployment_plan.py`); in a group of another shape each goes where there is
    room.
    """
    count = num_stages + num_drafters
    is_ours = len(group.bundle_specs) == 1 + count
    return [Bundle(group, index if is_ours else ANY) for index in range(1, 1 + count)]


def node_of(bundle: Bundle) -> str | None:
    """The id of the Ray node where a bundle is; None where that is not settled."""
    table = placement_group_table(bundle.group)
    return table["bundles_to_node_id"].get(bundle.index) or None


def at_node(node: str | None) -> NodeAffinitySchedulingStrategy | Literal["DEFAULT"]:
    """Ray's scheduling strategy for an actor on this node; without one Ray chooses."""
    return "DEFAULT" if node is None else NodeAffinitySchedulingStrategy(node, soft=False)


def strategy_of(bundle: Bundle | None) -> PlacementGroupSchedulingStrategy | Literal["DEFAULT"]:
    """Ray's scheduling strategy for an actor that goes there; without a bundle Ray chooses."""
    if bundle is None:
        return "DEFAULT"
    return PlacementGroupSchedulingStrategy(bundle.group, placement_group_bundle_index=bundle.index)
