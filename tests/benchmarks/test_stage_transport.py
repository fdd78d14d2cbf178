"""The benchmark of transports runs as it is started: its stages are made in other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = "draftline.benchmarks.transport.stage_transport"


@pytest.mark.full
@pytest.mark.xdist_group("cluster")
def test_every_transport_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    options = ["--stages", "2", "--rows", "1", "--blocks", "2", "--hidden-size", "8"]
    done = subprocess.run(
        [sys.executable, "-m", MODULE, *options, "--output", str(output)],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text("utf-8"))
    measured = {(row["transport"], row["in_flight"]) for row in found["steps"]}
    assert measured == {
        (name, count) for name in ("compiled_graph", "distributed") for count in (1, 3)
    }
    assert {row["transport"] for row in found["lives"]} == {"compiled_graph", "distributed"}
