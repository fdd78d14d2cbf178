"""The picture of a training shows its losses and each depth's acceptance."""

from __future__ import annotations

from math import nan
from pathlib import Path

import numpy as np
import pytest
from draftline.training.heads.curves import draw_curves

pytest.importorskip("matplotlib")
CHECKPOINTS = [[50, 3.0, 0.2, 0.1], [100, 2.0, 0.4, 0.3]]
LOSSES = [5 - 0.03 * step for step in range(100)]


def drawn(path: Path, losses: list[float], checkpoints: list[list[float]]) -> np.ndarray:
    from matplotlib.image import imread

    draw_curves(losses, checkpoints, path, "a head")
    return imread(path)[..., :3]


def test_both_panels_show_what_they_are_given(tmp_path: Path) -> None:
    first = drawn(tmp_path / "a.png", LOSSES, CHECKPOINTS)
    half = first.shape[1] // 2
    other_losses = drawn(tmp_path / "b.png", LOSSES[::-1], CHECKPOINTS)
    assert (first[:, :half] != other_losses[:, :half]).any()
    np.testing.assert_array_equal(first[:, half:], other_losses[:, half:])
    other_shares = drawn(tmp_path / "c.png", LOSSES, [CHECKPOINTS[0], [100, 2.0, 0.4, 0.9]])
    assert (first[:, half:] != other_shares[:, half:]).any()


@pytest.mark.parametrize("losses", [[], [nan] * 60 + LOSSES[60:], [4.0]])
def test_runs_whose_losses_are_not_all_known(tmp_path: Path, losses: list[float]) -> None:
    """Of an earlier version's checkpoint, and of a single step."""
    image = drawn(tmp_path / "a.png", losses, CHECKPOINTS)
    assert (image[:, : image.shape[1] // 2] < 0.9).any()
