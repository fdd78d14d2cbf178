"""Steps that a GPU took beside those that simulations build on."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from draftline.benchmarks.gpu.measure.against_profile import RESULTS, compared, main
from draftline.core.errors import ConfigError


def figure(group: str, name: str, milliseconds: float) -> dict[str, Any]:
    return {"group": group, "name": name, "ms": milliseconds}


def test_steps_are_computed_by_their_rows_and_what_these_see() -> None:
    names = ("batch 1, 1 token, context 1k", "batch 4, 8 nodes, context 8k")
    whole, part = "Llama-3-8B", "70B, layers 20-39 of 80"
    figures = [figure("sampling", "64 x 128k, greedy", 1.0)]
    figures += [figure(group, name, 10.0) for group in (whole, part) for name in names]
    steps = compared({"device": {"name": "NVIDIA H200"}, "figures": figures})
    assert [step.what for step in steps] == [whole, whole, part, part]
    one, tree, of_part, _ = steps
    assert [step.case.batch * step.case.rows_each for step in (one, tree)] == [1, 36]
    # 15 GB of weights and 0.13 of keys and values at 85 % of 4.8 TB/s, and 1 ms beside.
    assert one.computed_s == pytest.approx(15.14e9 / 4.08e12 + 1e-3, rel=0.01)
    assert tree.computed_s > 1.3 * one.computed_s
    # A quarter of a 70B hands nothing on here.
    assert of_part.computed_s == pytest.approx(139e9 / 4 / 4.08e12 + 0.3e-3, rel=0.01)
    assert of_part.ratio == pytest.approx(0.01 / of_part.computed_s)


def test_other_gpus_have_no_profile() -> None:
    with pytest.raises(ConfigError, match="no bundled profile is of Toy 9"):
        compared({"device": {"name": "Toy 9"}, "figures": []})


def test_the_bundled_results_are_as_the_profiles_say(capsys: pytest.CaptureFixture[str]) -> None:
    """So near that simulations are of use."""
    ratios = [step.ratio for step in compared(json.loads(RESULTS.read_text()))]
    assert 0.9 < statistics.median(ratios) < 1.15
    assert min(ratios) > 0.75
    assert max(ratios) < 1.5
    main(batches="1", results=RESULTS)
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].startswith("| 70B, layers 20-39 of 80: batch 1, 1 token, context 1k | 1 |")
    assert printed[-1].startswith(f"{len(ratios)} steps")
