"""The whole GPU benchmark with tiny shapes, in a process that has neither Ray nor Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from draftline.benchmarks.gpu.plan import TINY_PLAN
from support.tools.tree_copy import ROOT

# A module that is None cannot be imported: whoever tries ends the run.
RUN = """
import runpy, sys
for name in ("ray", "redis", "grpc"):
    sys.modules[name] = None
sys.argv = ["gpu", "--device", {device!r}, "--tiny", "--together", "--output", {output!r}]
runpy.run_module("draftline.benchmarks.gpu", run_name="__main__")
"""
GOALS = 5

# The run is made once a worker.
pytestmark = pytest.mark.xdist_group("gpu_run")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.full),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the run left: out.txt, gpu.json, gpu.png."""
    folder = tmp_path_factory.mktemp("gpu")
    code = RUN.format(device=request.param, output=str(folder / "gpu.json"))
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, check=False, text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "130"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    (folder / "out.txt").write_text(result.stdout)
    return folder


def test_the_json_holds_every_part(folder: Path) -> None:
    found = json.loads((folder / "gpu.json").read_text())
    assert found["failed"] == {}
    assert found["skipped"] == {}
    groups = {figure["group"] for figure in found["figures"]}
    plan = TINY_PLAN
    parts = {"rates", "attention of a layer", "sampling", "products of a layer", "drafts of heads"}
    parts |= {"states of a layer"}
    assert groups >= parts | {plan.whole.name, plan.part.name}
    for figure in found["figures"]:
        assert figure["ms"] > 0
        assert figure["to_floor"] == pytest.approx(figure["ms"] / figure["floor_ms"])
    names = {figure["name"] for figure in found["figures"] if figure["group"] == plan.whole.name}
    assert names == {case.name for case in plan.whole.cases}
    assert len(found["goals"]) == GOALS
    assert all(goal["found"] is not None for goal in found["goals"])


def test_the_demo_says_the_same_with_drafts(folder: Path) -> None:
    demo = json.loads((folder / "gpu.json").read_text())["facts"]["demo"]
    assert demo["prompts"] == demo["same_tokens"] == TINY_PLAN.demo_prompts
    assert demo["tau"] > 1


def test_the_table_shows_the_goals(folder: Path) -> None:
    text = (folder / "out.txt").read_text()
    assert "x floor" in text
    assert "batch 4, 64 nodes, context 256" in text
    assert "x one token" in text
    assert "x ours" in text
    assert text.count("reached") == GOALS
    assert "not measured" not in text


def test_there_is_a_plot(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    height, width, _ = imread(folder / "gpu.png").shape
    assert width > height > 500
