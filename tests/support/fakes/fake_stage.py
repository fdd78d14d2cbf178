"""A stage without a model: what it answers depends on every step that any stage has run before."""

from __future__ import annotations

import os
import signal
import time
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from draftline.cluster.transport.stage_spec import StageSpec
from draftline.core.interfaces import StageMemory
from draftline.core.steps import StepInput, StepOutput
from support.inputs.steps import BLOCK_SIZE, PagedRequest, make_step

if TYPE_CHECKING:
    from draftline.models.stage.stage import PendingOutput

HIDDEN_SIZE = 256

# Token ids that make a stage misbehave; the position of the same row says which stage.
SLOW_TOKEN, FAIL_TOKEN, DIE_TOKEN = 9001, 9002, 9003
# Makes every stage forget its past.
RESET_TOKEN = 9004
# Fails when the last stage's answer is waited for.
FAIL_LATE_TOKEN = 9005
# The device fails: for good, and by memory that ran out.
LOSE_DEVICE_TOKEN, OUT_OF_MEMORY_TOKEN = 9006, 9007
SLOW_SECONDS = 0.1
FIRST_CHECKSUM = 7


@dataclass(frozen=True)
class FakeSpan:
    """As `LayerSpan`, without the seconds that importing transformers takes in every worker."""

    first: int
    last: int
    num_layers: int

    @property
    def is_last(self) -> bool:
        return self.last == self.num_layers


MEMORY = StageMemory(1000, 10)


@dataclass
class FakeStage:
    """Hidden states are running checksums, so a lost, repeated or swapped step shows at once."""

    index: int
    is_last: bool
    hidden_size: int = HIDDEN_SIZE
    checksum: int = FIRST_CHECKSUM
    num_blocks: int = 1
    memory: StageMemory = MEMORY
    decodes_several: bool = False

    def launch(self, step: StepInput, hidden: torch.Tensor | None) -> torch.Tensor | PendingOutput:
        """Checksum of the own past, the step's tokens and blocks, and the hidden states."""
        assert (hidden is None) == (self.index == 0)
        self._misbehave(step)
        past = FIRST_CHECKSUM if step.token_ids[0] == RESET_TOKEN else self.checksum
        self.checksum = zlib.crc32(step.token_ids.tobytes(), past)
        self.checksum = zlib.crc32(step.block_tables.tobytes(), self.checksum)
        if hidden is not None:
            self.checksum = zlib.crc32(hidden.numpy().tobytes(), self.checksum)
        if not self.is_last:
            rows = np.arange(len(step.token_ids) * self.hidden_size, dtype=np.float32)
            values = rows.reshape(-1, self.hidden_size) + self.checksum % 65521
            return torch.from_numpy(values)
        tokens = (np.arange(len(step.logits_rows)) + self.checksum) % 4096
        output = StepOutput(step.step_id, tokens.astype(np.int32))
        return lambda: self._late(step, output)

    def reset(self) -> None:
        """Forget the past."""
        self.checksum = FIRST_CHECKSUM

    def _late(self, step: StepInput, output: StepOutput) -> StepOutput:
        if step.token_ids[0] == FAIL_LATE_TOKEN:
            raise ValueError("this answer was told to fail")
        return output

    def _misbehave(self, step: StepInput) -> None:
        if step.positions[0] != self.index:
            return
        token = int(step.token_ids[0])
        if token == SLOW_TOKEN:
            time.sleep(SLOW_SECONDS)
        elif token == FAIL_TOKEN:
            raise ValueError("this stage was told to fail")
        elif token == LOSE_DEVICE_TOKEN:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        elif token == OUT_OF_MEMORY_TOKEN:
            raise torch.OutOfMemoryError("CUDA out of memory")
        elif token == DIE_TOKEN:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStageSpec(StageSpec):
    """Builds a `FakeStage`, or fails to with `error`."""

    error: Exception | None = None
    is_apart: bool = False

    @property
    def computes_apart(self) -> bool:
        """As told, since no device is at hand that does."""
        return self.is_apart

    def build(self) -> FakeStage:
        """The stage of this span, one layer a stage."""
        if self.error is not None:
            raise self.error
        return FakeStage(self.span.first, self.span.is_last, self.hidden_size)


def fake_specs(
    num_stages: int,
    hidden_size: int = HIDDEN_SIZE,
    num_cpus: float = 0.5,
    error: Exception | None = None,
    is_apart: bool = False,
) -> list[FakeStageSpec]:
    """Specs of a pipeline of fake stages; `error` is raised by the last one's build."""
    return [
        FakeStageSpec(
            model_path="",
            span=FakeSpan(index, index + 1, num_stages),
            num_blocks=1,
            block_size=1,
            hidden_size=hidden_size,
            num_cpus=num_cpus,
            error=error if index == num_stages - 1 else None,
            is_apart=is_apart,
        )
        for index in range(num_stages)
    ]


def fake_step(step_id: int, num_rows: int = 3, token: int = 5, position: int = 0) -> StepInput:
    """A step of one request; `token` and `position` of its first row steer `FakeStage`."""
    tokens = [token, *range(step_id, step_id + num_rows - 1)]
    blocks = range((position + num_rows) // BLOCK_SIZE + 1)
    step = make_step([PagedRequest(blocks).chunk(tokens, position)], step_id=step_id)
    return replace(step, request_keys=(step_id % 2,))
