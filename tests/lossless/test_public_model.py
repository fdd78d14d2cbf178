"""A public chat model, which is fetched: its answers beside transformers', with all drafters."""

from __future__ import annotations

import pytest
from draftline.benchmarks.lossless.matrix import Matrix, run_matrix
from draftline.models.load.public_models import fetch


@pytest.mark.public
@pytest.mark.full
@pytest.mark.timeout(3 * 3600)
def test_chats_with_all_drafters_are_those_of_transformers() -> None:
    fetch("smollm2")
    matrix = Matrix(
        model="smollm2",
        tokens=64,
        sampled_prompts=4,
        backends=("local",),
        mixes=("copying", "tli"),
        together=(8,),
    )
    report = run_matrix(matrix)
    assert not report.faults, report.summary()
    assert len(report.near_ties) <= 1 + sum(cell.compared for cell in report.cells) // 50
    assert all(cell.tau > 1.1 for cell in report.cells)
