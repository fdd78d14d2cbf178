"""Where and how everything is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .instruments.clock import Clock, TimeBudget
from .plan import GpuPlan, StepCase

DTYPE = torch.bfloat16
# Of the memory that is free: the rest is for activations and logits.
CACHE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class GpuSetting:
    """What all parts share."""

    plan: GpuPlan
    clock: Clock
    budget: TimeBudget
    attention: str
    block_size: int

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return self.clock.device

    def free_bytes(self) -> float:
        """Device memory for a cache; no bound on a CPU, whose shapes are tiny."""
        if self.device.type != "cuda":
            return float("inf")
        return CACHE_SHARE * torch.cuda.mem_get_info(self.device)[0]

    def num_blocks(self, cases: tuple[StepCase, ...], bytes_per_slot: int) -> int:
        """KV blocks for the largest of the cases that fit."""
        needed = [case.num_slots(self.block_size) for case in cases]
        room = self.free_bytes() / bytes_per_slot
        return max((slots for slots in needed if slots <= room), default=0) // self.block_size
