"""No request waits for the compilation of a loop: all that serving calls is loaded at the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import gc, sys
from numba.core.dispatcher import Dispatcher
from draftline import Engine, EngineConfig, SamplingParams
from draftline.cluster.config import DrafterConfig

KINDS = "prompt_lookup", "suffix", "spectra", "lookahead", "token_recycling", "anpd"

def loaded():
    found = {}
    for each in gc.get_objects():
        if isinstance(each, Dispatcher):
            own = found.setdefault(f"{each.py_func.__module__}.{each.py_func.__name__}", set())
            own.update(map(str, each.signatures))
    return found

config = EngineConfig(
    model=sys.argv[1], max_num_seqs=3, compile="off", node_budget=sys.argv[2],
    drafters=tuple(DrafterConfig(kind=kind) for kind in KINDS),
)
with Engine(config) as engine:
    before = loaded()
    prompts = ["for i in range(10): print(i)\\n" * count for count in (1, 2, 4)]
    for temperature in (0.0, 1.0):
        for some in (prompts[:1], prompts):
            params = SamplingParams(temperature=temperature, max_tokens=100, ignore_eos=True)
            engine.generate(some, params)
    late = {name: sorted(own - before.get(name, set())) for name, own in loaded().items()}
    print({name: own for name, own in late.items() if own})
"""


def late(checkpoint: Path, node_budget: str) -> str:
    """What a process that serves loads after its start."""
    command = [sys.executable, "-c", SCRIPT, str(checkpoint), node_budget]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()[-1]


def test_an_adaptive_engine_loads_nothing_late(checkpoint: Path) -> None:
    assert late(checkpoint, "adaptive") == "{}"


@pytest.mark.full
def test_an_engine_that_always_drafts_loads_nothing_late(checkpoint: Path) -> None:
    assert late(checkpoint, "full") == "{}"
