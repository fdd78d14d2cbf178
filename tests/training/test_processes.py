"""Several processes train the head that one would train on all their texts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draftline.training.heads.processes import mean_count, share_of_rows, text_generator
from draftline.training.heads.trainer import read_log, read_losses
from support.inputs.tiny_heads import EVERY_NETWORK
from support.tools import train_shared
from support.tools.tiny_models import save_tiny_model


@pytest.mark.full
@pytest.mark.net
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    """The same losses, acceptance and weights, of texts of several lengths."""
    target = save_tiny_model("llama", tmp_path / "tiny")
    one, two = tmp_path / "one", tmp_path / "two"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        train_shared.__file__, str(target), str(two),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, timeout=150, check=False)
    assert run.returncode == 0, run.stderr.decode()
    train_shared.train_every_network(target, one)
    for kind in EVERY_NETWORK:
        losses = read_losses(one / kind)
        assert len(losses) == train_shared.SHARED_PLAN.num_steps
        assert read_losses(two / kind) == pytest.approx(losses, rel=1e-5), kind
        expected, found = (list(read_log(folder / kind)) for folder in (one, two))
        assert [row[2:] for row in found] == [row[2:] for row in expected]
        weights, shared = (
            torch.load(folder / kind / train_shared.WEIGHTS, weights_only=True)
            for folder in (one, two)
        )
        for name, weight in weights.items():
            torch.testing.assert_close(shared[name], weight, atol=1e-4, rtol=1e-3, msg=kind + name)


def test_one_process_has_all_rows() -> None:
    assert mean_count(3) == 3.0
    values = torch.tensor([1.0, 2.0, 6.0])
    assert share_of_rows(values, 3.0).item() == 3.0
    # Another process has as many rows again: the mean of both processes' shares is that of all.
    others = torch.tensor([4.0])
    shares = [share_of_rows(part, (3 + 1) / 2) for part in (values, others)]
    assert sum(shares).item() / 2 == pytest.approx(13 / 4)
    assert share_of_rows(values[:0], 0.0).item() == 0.0


def test_what_is_drawn_for_a_text_follows_from_its_place() -> None:
    first = torch.rand(5, generator=text_generator(0, 7))
    assert torch.equal(torch.rand(5, generator=text_generator(0, 7)), first)
    # A text's numbers do not depend on how many are drawn.
    assert torch.equal(torch.rand(3, generator=text_generator(0, 7)), first[:3])
    for other in ((0, 8), (1, 7)):
        assert not torch.equal(torch.rand(5, generator=text_generator(*other)), first)
