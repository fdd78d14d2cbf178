"""Runs of the bundled models' training go on after a kill as if there had been none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.training.language_model import Phase, TokenStreams, TrainingPlan, train
from support.fakes.recorded_progress import RecordedWork
from support.tools.tiny_models import VOCAB_SIZE, tiny_config

STREAM = np.random.default_rng(0).integers(0, VOCAB_SIZE, 600)
TEXTS = TokenStreams(first=STREAM, more=STREAM[::-1].copy(), held_out=STREAM[:40])
PLAN = TrainingPlan(
    num_steps=5, phases=(Phase(0.0, 8, 3), Phase(0.5, 16, 2)), checkpoint_every=2, compile=False
)


class Killed(Exception):
    """What ends a run in the middle."""


class KillingWork(RecordedWork):
    """Ends the run at its third step, behind the last checkpoint."""

    def advance(self, count: float = 1, note: str | None = None) -> None:
        super().advance(count, note)
        if self.done == 3:
            raise Killed


@contextmanager
def killing(
    label: str, *, total: float | None, unit: str, done: float = 0
) -> Iterator[RecordedWork]:
    yield KillingWork(label, total, done)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_a_run_that_was_killed_goes_on(kind: str, tmp_path: Path) -> None:
    config = tiny_config(kind)
    whole = train(config, TEXTS, PLAN, tmp_path / "whole")
    with pytest.raises(Killed):
        train(config, TEXTS, PLAN, tmp_path / "killed", killing)
    again = train(config, TEXTS, PLAN, tmp_path / "killed")
    losses = [(tmp_path / run / "loss.csv").read_text() for run in ("whole", "killed")]
    assert losses[0] == losses[1]
    assert losses[0].count("\n") == 3
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=0, rtol=0)
