"""The training step of each kind of network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...models.heads.dflash import DFlash
from ...models.heads.dspark import DSpark
from ...models.heads.feature_head import FeatureHead
from ...models.heads.load_head import Head, HeadConfig
from ...models.heads.medusa import Medusa
from ...models.heads.p_eagle import PEagle
from ...models.heads.spec_former import SpecFormer
from .anchored_blocks import BLOCKS, BlockPlan, block_acceptance, random_blocks, train_blocks
from .draft_positions import (
    HEAD_DECAY,
    counted_rows,
    head_acceptance,
    position_acceptance,
    random_rows,
    train_heads,
    train_positions,
)
from .feature_passes import PassPlan, depth_acceptance, train_as_tested, train_passes
from .markov_blocks import markov_acceptance, train_markov_blocks
from .mask_rows import MaskPlan, mask_acceptance, random_rollouts, train_masks
from .student import Divergence, Student, StudentConfig, chain_acceptance, train_student
from .target import Target, TextBatch

# What is trained.
Network = Head | Student
NetworkConfig = HeadConfig | StudentConfig
# Depth of the greedy chains that evaluate feature heads and students.
DEPTH = 6


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """The inputs of a step besides its texts.

    done     completed fraction of the run, 0 to 1
    uniform  float32 [texts, length]  random numbers from 0 to 1
    """

    done: float
    uniform: Tensor


class Objective(Protocol):
    """The training step and the evaluation of a network."""

    def learn(self, target: Target, batch: TextBatch, draw: Draw) -> float:
        """Add gradients to the network's parameters; returns this process's share of the loss."""
        ...

    def acceptance(self, target: Target, batch: TextBatch) -> list[tuple[int, int]]:
        """For each depth of a greedy chain: the number of drafts after accepted ones, and of
        accepted drafts."""
        ...


class PassObjective:
    """Passes of a feature head (`feature_passes.py`); the loss is that of the first."""

    def __init__(self, head: FeatureHead, plan: PassPlan) -> None:
        self._head, self._plan = head, plan

    def learn(self, target: Target, batch: TextBatch, draw: Draw) -> float:
        """As of `Objective`."""
        reports = train_passes(
            self._head, target.embed, target.lm_head, batch, self._plan, done=draw.done
        )
        return reports[0].loss

    def acceptance(self, target: Target, batch: TextBatch) -> list[tuple[int, int]]:
        """As of `Objective`."""
        return depth_acceptance(self._head, target.embed, target.lm_head, batch, DEPTH)


class TestedObjective:
    """Passes of an EAGLE-3 head as one graph; the loss is that of the first."""

    def __init__(self, head: FeatureHead, plan: PassPlan) -> None:
        self._head, self._plan = head, plan

    def learn(self, target: Target, batch: TextBatch, draw: Draw) -> float:
        """As of `Objective`."""
        num_passes = self._plan.passes_at(draw.done)
        return train_as_tested(self._head, target.embed, target.lm_head, batch, num_passes)[0].loss

    def acceptance(self, target: Target, batch: TextBatch) -> list[tuple[int, int]]:
        """As of `Objective`."""
        return depth_acceptance(self._head, target.embed, target.lm_head, batch, DEPTH)


class MaskObjective:
    """Masks of a P-EAGLE drafter after random rows (`mask_rows.py`)."""

    def __init__(self, head: PEagle, plan: MaskPlan) -> None:
        self._head, self._plan = head, plan

    def learn(self, target: Target, batch: TextBatch, draw: Draw) -> float:
        """As of `Objective`."""
        rollouts = random_rollouts(batch, self._head.config.draft_length, self._plan, draw.uniform)
        losses = train_masks(self._head, target.embed, target.lm_head, batch, rollouts)
        return sum(losses) / len(losses)

    def acceptance(self, target: Target, batch: TextBatch) -> list[tuple[int, int]]:
        """As of `Objective`."""
        return mask_acceptance(self._head, target.embed, target.lm_head, batch)


class PositionObjective:
    """All drafts of a SpecFormer at once (`draft_positions.py`)."""

    def __init__(self, drafter: SpecFormer, plan: BlockPlan) -> None:
        self._drafter, self._plan = drafter, plan

    def learn(self, target: Target, batch: TextBatch, draw: Draw) -> float:
        """As of `Objective`."""
        rows = _rows(self._drafter.config.draft_length, self._plan, batch, draw)
        losses = train_positions(self._drafter, target.norm, target.lm_head, batch, rows)
        return sum(losses) / len(losses)

    def acceptance(self, target: Target, batch: TextBatch) -> list[tuple[int, int]]:
        """As of `Objective`."""
        return position_acceptance(self._drafter, target.norm, target.lm_head, batch)


class MedusaObjective:
    """Medusa's heads, each on its own token (`draft_positions.py`).

    Losses have weights 0.8^k for head k from 1.
    """

    def __init__(self, heads: Medusa, plan: BlockPlan) -> None:
        self._heads, self._plan = heads, plan
        self._weights = [HEAD_DECAY ** (place + 1) for place in range(heads.config.draft_length)]

    def learn(self, target: Target, batch: TextBatch, draw: Draw) -> float:
        """As of `Objective`."""
        rows = _rows(self._heads.config.draft_length, self._plan, batch, draw)
        losses = train_heads(self._heads, target.lm_head, batch, self._weights, rows)
        return sum(losses) / len(losses)

    def acceptance(self, target: Target, batch: TextBatch) -> list[tuple[int, int]]:
        """As of `Objective`."""
        return head_acceptance(self._heads, target.lm_head, batch)


class BlockObjective:
    """Blocks of a DFlash drafter at random tokens (`anchored_blocks.py`)."""

    def __init__(self, drafter: DFlash, plan: BlockPlan) -> None:
        self._drafter, self._plan = drafter, plan

    def learn(self, target: Target, batch: TextBatch, draw: Draw) -> float:
        """As of `Objective`."""
        blocks = random_blocks(batch, self._plan.num_anchors or BLOCKS, draw.uniform)
        losses = train_blocks(self._drafter, target.embedding, target.lm_head, batch, blocks)
        return sum(losses) / len(losses)

    def acceptance(self, target: Target, batch: TextBatch) -> list[tuple[int, int]]:
        """As of `Objective`."""
        return block_acceptance(self._drafter, target.embedding, target.lm_head, batch)


class MarkovObjective:
    """Blocks of a DSpark drafter at random tokens (`markov_blocks.py`)."""

    def __init__(self, drafter: DSpark, plan: BlockPlan) -> None:
        self._drafter, self._plan = drafter, plan

    def learn(self, target: Target, batch: TextBatch, draw: Draw) -> float:
        """As of `Objective`."""
        blocks = random_blocks(batch, self._plan.num_anchors or BLOCKS, draw.uniform)
        losses = train_markov_blocks(self._drafter, target.embedding, target.lm_head, batch, blocks)
        return sum(losses) / len(losses)

    def acceptance(self, target: Target, batch: TextBatch) -> list[tuple[int, int]]:
        """As of `Objective`."""
        return markov_acceptance(self._drafter, target.embedding, target.lm_head, batch)


class StudentObjective:
    """The divergence of a student from the target (`student.py`)."""

    def __init__(self, student: Student, divergence: Divergence) -> None:
        self._student = student
        self._divergence: Divergence = divergence

    def learn(self, target: Target, batch: TextBatch, draw: Draw) -> float:  # noqa: ARG002
        """As of `Objective`."""
        return train_student(self._student, target.lm_head, batch, self._divergence)

    def acceptance(self, target: Target, batch: TextBatch) -> list[tuple[int, int]]:  # noqa: ARG002
        """As of `Objective`."""
        return chain_acceptance(self._student, batch, DEPTH)


def _rows(draft_length: int, plan: BlockPlan, batch: TextBatch, draw: Draw) -> Tensor:
    """bool [texts, rows]: the rows that draft in a step."""
    rows = counted_rows(batch, draft_length)
    if plan.num_anchors is None:
        return rows
    return random_rows(rows, plan.num_anchors, draw.uniform)


def objective_of(
    network: Network, passes: PassPlan, blocks: BlockPlan, masks: MaskPlan, divergence: Divergence
) -> Objective:
    """The objective of a network; `passes` is for feature heads, `blocks` for those that draft
    all at once, `masks` for P-EAGLE, `divergence` for students.
    """
    if isinstance(network, Student):
        return StudentObjective(network, divergence)
    if isinstance(network, FeatureHead):
        return _feature_objective(network, passes, masks)
    if isinstance(network, DSpark):
        return MarkovObjective(network, blocks)
    if isinstance(network, DFlash):
        return BlockObjective(network, blocks)
    if isinstance(network, SpecFormer):
        return PositionObjective(network, blocks)
    return MedusaObjective(network, blocks)


def _feature_objective(head: FeatureHead, passes: PassPlan, masks: MaskPlan) -> Objective:
    if isinstance(head, PEagle):
        return MaskObjective(head, masks)
    if head.config.fusion == "pair":
        return TestedObjective(head, passes)
    return PassObjective(head, passes)
