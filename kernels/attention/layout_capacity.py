"""How large the steps of a layout may be, and the room for their partial results."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from ...core.steps import StepInput
from .spec import AttentionShape
from .split_rule import SplitRule


@dataclass(frozen=True, slots=True)
class LayoutCapacity:
    """The largest step that a layout holds.

    num_columns  own columns of all requests: rows, and nodes in flight
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


class PartialResults:
    """Room for the partial results of split contexts; layouts whose steps run in turn share it.

    out      float32 [lines, kv_heads, head_dim]
    sums     float32 [lines, kv_heads]  log-sum-exp to the base 2
    arrived  int32 [lines, kv_heads] at the first line of a tile: how many of its splits are done; 0
             between launches
    """

    def __init__(
        self, shape: AttentionShape, rule: SplitRule, num_requests: int, device: torch.device
    ) -> None:
        """Room for every step of `num_requests` requests, split by `rule`."""
        self.rule, self._shape, self._num_requests = rule, shape, num_requests
        sizes = (max(num_requests, 1) * rule.split_lines, shape.num_kv_heads)
        self.out = torch.empty((*sizes, shape.head_dim), dtype=torch.float32, device=device)
        self.sums = torch.empty(sizes, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(sizes, dtype=torch.int32, device=device)

    def holding(self, num_requests: int) -> PartialResults:
        """This object, or a larger one for more requests; both split a context in the same way."""
        if num_requests <= self._num_requests:
            return self
        return PartialResults(self._shape, self.rule, num_requests, self.out.device)
