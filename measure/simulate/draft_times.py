"""How long drafts take under a cost profile, by their trees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...core.arrays import ROOT
from ...core.proposals import Proposal
from ...models.heads.load_head import read_head_checkpoint
from .cost_profile import CostProfile


def draft_seconds(
    profile: CostProfile, kind: str, proposals: Sequence[Proposal], num_passes: int | None = None
) -> float:
    """Seconds of the profile's drafter: all requests' trees together, a pass a level.

    kind        one that the profile has
    num_passes  that the real one took, where it counts them: text that is read and draws that
                become fewer tokens are passes, too
    """
    if not proposals:
        return 0.0
    levels = [_level_sizes(proposal) for proposal in proposals]
    depth = max(map(len, levels), default=0) if num_passes is None else num_passes
    # A level is read with the pass that is behind it.
    widest = sum(max(sizes, default=0) for sizes in levels)
    return profile.draft_s(kind, depth, widest)


def head_kind(folder: Path) -> str:
    """The kind of a head's checkpoint, as profiles name it. Raises `CheckpointError`."""
    return str(read_head_checkpoint(folder).kind)


def _level_sizes(proposal: Proposal) -> list[int]:
    """Nodes of each level of a tree."""
    depths: list[int] = []
    sizes: list[int] = []
    for parent in proposal.parents.tolist():
        depth = 0 if parent == ROOT else depths[parent] + 1
        depths.append(depth)
        if depth == len(sizes):
            sizes.append(0)
        sizes[depth] += 1
    return sizes
