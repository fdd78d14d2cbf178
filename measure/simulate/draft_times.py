"""The time of drafts under a cost profile, by their trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...cluster.config import HEAD, DrafterConfig
from ...cluster.drafting.options import head_folder
from ...core.arrays import ROOT
from ...core.proposals import Proposal
from ...models.heads.load_head import read_head_checkpoint
from .cost_profile import SMALL_MODEL, CostProfile


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """The times of one drafter in a profile. `kind`: its name in the profile."""

    profile: CostProfile
    kind: str

    @property
    def are_known(self) -> bool:
        """Whether the profile has its kind; otherwise its real time is used."""
        return self.kind in self.profile.drafters

    @property
    def pass_s(self) -> float:
        """Seconds of a pass of one row; 0 if unknown."""
        return self._draft_s(1, 1) if self.are_known else 0.0

    def seconds(self, proposals: Sequence[Proposal], num_passes: int | None = None) -> float:
        """Seconds of a draft with known times: all requests' trees together, a pass a level.

        num_passes  passes of the real draft, if it counts them; they include passes over new text,
                    and draws that give fewer tokens
        """
        if not proposals:
            return 0.0
        levels = [_level_sizes(proposal) for proposal in proposals]
        depth = max(map(len, levels), default=0) if num_passes is None else num_passes
        # The next pass reads a level.
        widest = sum(max(sizes, default=0) for sizes in levels)
        return self._draft_s(depth, widest)

    def _draft_s(self, depth: int, num_rows: int) -> float:
        return self.profile.draft_s(self.kind, depth, num_rows)


def times_of(
    drafter: DrafterConfig, profile: CostProfile, small_model: str = SMALL_MODEL
) -> DraftTimes:
    """The times of a drafter in a profile.

    small_model  the profile's entry for small models
    Raises `CheckpointError` or `ConfigError` for a head that cannot be read.
    """
    if drafter.kind == HEAD:
        return head_times(head_folder(drafter), profile)
    is_model = drafter.kind == SMALL_MODEL
    return DraftTimes(profile, small_model if is_model else drafter.kind)


def head_times(folder: Path, profile: CostProfile) -> DraftTimes:
    """The same for a head, with the same errors."""
    return DraftTimes(profile, str(read_head_checkpoint(folder).kind))


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
