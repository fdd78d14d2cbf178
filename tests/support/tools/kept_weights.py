"""Stages whose weights are kept quantised, beside those of their values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draftline.kernels.cpu.build import vectors
from draftline.models.stage.stage import Stage
from torch import Tensor

from ..inputs.steps import PagedRequest, make_step


def logits(stage: Stage, first: int = 0, count: int = 20) -> Tensor:
    """Of a prompt's rows from `first` on, float32 [count, vocabulary]."""
    step = make_step([PagedRequest(range(8)).chunk(list(range(2, 2 + count)), first)])
    return stage.logits(step, None, np.arange(count, dtype=np.int32))


def kept(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    """What the stages loaded so far keep weights as, by their log lines of this event."""
    return [
        record.getMessage().partition("weights=")[2].strip("'")
        for record in caplog.records
        if event in record.getMessage()
    ]


def assert_alike(found: Tensor, expected: Tensor, kinds: str = "uint4", atol: float = 1e-4) -> None:
    """Bit by bit; but for roundings where the kinds of weights have integers or e2m1, which are
    multiplied by dot products of bytes where the processor has these."""
    if vectors().has_byte_dots and ("int" in kinds or "e2m1" in kinds):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=atol)
    else:
        assert torch.equal(found, expected)
