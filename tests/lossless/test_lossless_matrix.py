"""Greedy answers equal transformers', sampled ones the engine's own without speculation."""

from __future__ import annotations

import pytest
from draftline.benchmarks.lossless.matrix import HYBRID_MIXES, MIXES, Matrix, Report, run_matrix


def check_lossless(report: Report) -> None:
    assert report.cells
    assert not report.faults, report.summary()
    # Rounding makes a near-tie once in many thousand tokens; more would be a fault in disguise.
    assert len(report.near_ties) <= 1 + sum(cell.compared for cell in report.cells) // 50


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "stages", "mixes", "together"),
    [
        ("demo", 3, tuple(MIXES), (2,)),
        ("demo", 1, ("spectra", "all"), (1, 2)),
        ("demo-hybrid", 2, ("headless",), (2,)),
    ],
    ids=["3", "1", "hybrid"],
)
def test_local_engines_with_every_drafter_change_no_token(
    model: str, stages: int, mixes: tuple[str, ...], together: tuple[int, ...]
) -> None:
    reduced = Matrix(
        model=model,
        prompts=2,
        tokens=24,
        sampled_prompts=1,
        stages=(stages,),
        backends=("local",),
        mixes=mixes,
        together=together,
    )
    report = run_matrix(reduced)
    check_lossless(report)
    assert {cell.mix for cell in report.cells if cell.tau > 1.1} >= {
        "spectra", "all", "headless"
    }.intersection(mixes)  # fmt: skip


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_ray_engines_change_no_token() -> None:
    reduced = Matrix(
        prompts=3,
        tokens=24,
        sampled_prompts=1,
        stages=(2,),
        backends=("ray",),
        mixes=("all",),
        together=(3,),
    )
    check_lossless(run_matrix(reduced))


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(4 * 3600)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("model", "mixes"), [("demo", tuple(MIXES)), ("demo-hybrid", HYBRID_MIXES)]
)
def test_the_whole_matrix(model: str, mixes: tuple[str, ...]) -> None:
    check_lossless(run_matrix(Matrix(model=model, mixes=mixes)))
