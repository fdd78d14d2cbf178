"""Engines on Ray, one after another in a process that does not start Ray itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from draftline import Engine, EngineConfig
for _ in range(2):
    with Engine(EngineConfig(model="demo", backend="ray", pipeline_parallel_size=2)) as engine:
        assert engine.generate(["def f(x):"])[0].text
    print("answered", flush=True)
"""


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(400)
def test_two_engines_answer_one_after_another() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.stdout.count("answered") == 2, run.stderr
    assert run.returncode == 0
