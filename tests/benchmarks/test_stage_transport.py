"""The benchmark of the way between stages runs as it is started: in other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = "draftline.benchmarks.transport.stage_transport"


@pytest.mark.full
@pytest.mark.xdist_group("cluster")
def test_steps_and_lives_are_measured(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    options = ["--stages", "2", "--rows", "1", "--blocks", "2", "--hidden-size", "8"]
    done = subprocess.run(
        [sys.executable, "-m", MODULE, *options, "--output", str(output)],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text("utf-8"))
    assert [(row["num_rows"], row["in_flight"]) for row in found["steps"]] == [(1, 1), (1, 3)]
    assert [row["num_stages"] for row in found["lives"]] == [2]
