"""How large the steps of a layout may be, and how far their contexts are split."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from ...core.steps import StepInput
from .spec import AttentionShape
from .tile_plan import TILE_LINES, lines_of_tiles


@dataclass(frozen=True, slots=True)
class LayoutCapacity:
    """The largest step that a layout holds.

    num_columns  own columns of all requests: rows, and nodes of trees still in flight
    num_blocks   entries of all requests' block tables together
    num_words    64-bit words of ancestor bits of a row
    """

    num_rows: int
    num_requests: int
    num_columns: int
    num_blocks: int
    num_words: int

    @classmethod
    def of(cls, step: StepInput, block_size: int) -> LayoutCapacity:
        """The capacity for a step, each side rounded up to a power of two so that few serve all."""
        sides = astuple(cls.exact(step, block_size))
        return cls(*(1 << max(side - 1, 0).bit_length() for side in sides))

    @classmethod
    def exact(cls, step: StepInput, block_size: int) -> LayoutCapacity:
        """The least capacity that holds a step."""
        trees = [tree for tree in step.trees if tree is not None]
        in_flight = sum(len(tree.slots) - len(tree.ancestors) for tree in trees)
        num_rows = len(step.token_ids)
        return cls(
            num_rows,
            len(step.context_lens),
            num_rows + in_flight,
            int((-(-step.context_lens // block_size)).sum()),
            max((tree.ancestors.shape[1] for tree in trees), default=1),
        )

    def holds(self, other: LayoutCapacity) -> bool:
        """Whether a step of capacity `other` fits."""
        return (
            self.num_rows >= other.num_rows
            and self.num_requests >= other.num_requests
            and self.num_columns >= other.num_columns
            and self.num_blocks >= other.num_blocks
            and self.num_words >= other.num_words
        )


@dataclass(frozen=True, slots=True)
class SplitBudget:
    """How far contexts are split.

    num_programs  items that should run at once for every key/value head
    max_partials  partial results that there is room for
    """

    num_programs: int = 32
    max_partials: int = 128


class PartialResults:
    """Room for the partial results of split tiles; layouts whose steps run in turn share it.

    out    float32 [max_partials, kv_heads, lines, head_dim]
    sums   float32 [max_partials, kv_heads, lines]  log-sum-exp to the base 2
    """

    def __init__(self, shape: AttentionShape, budget: SplitBudget, device: torch.device) -> None:
        self.budget = budget
        lines = max(TILE_LINES[-1], lines_of_tiles(shape.share, 1))
        sizes = (budget.max_partials, shape.num_kv_heads, lines)
        self.out = torch.empty((*sizes, shape.head_dim), dtype=torch.float32, device=device)
        self.sums = torch.empty(sizes, dtype=torch.float32, device=device)
