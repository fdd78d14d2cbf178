"""No sampling parameter makes speculation change a token; the results file holds every cell."""

from __future__ import annotations

import json

import pytest
from draftline.benchmarks.lossless.sampling_matrix import (
    COLUMNS,
    PARAMETERS,
    RESULT,
    run_matrix,
)


@pytest.mark.parametrize(
    ("mixes", "parameters"),
    [
        (("all",), tuple(PARAMETERS)),
        (COLUMNS, ("temperature 0", "top_k", "json schema", "all together")),
        pytest.param(COLUMNS, tuple(PARAMETERS), marks=pytest.mark.full),
    ],
    ids=["all drafters", "each drafter", "every cell"],
)
def test_no_parameter_with_any_drafter_changes_an_answer(
    mixes: tuple[str, ...], parameters: tuple[str, ...]
) -> None:
    sheet = run_matrix(prompts=2, tokens=24, mixes=mixes, parameters=parameters)
    assert len(sheet.cells) == len(parameters) * len(mixes)
    assert not sheet.faults, sheet.faults
    accepted = {mix: sum(c.accepted for c in sheet.cells if c.mix == mix) for mix in mixes}
    assert min(accepted.values()) > 20, accepted


def test_the_results_hold_every_cell() -> None:
    cells = json.loads(RESULT.read_text("utf-8"))["cells"]
    assert {(one["parameter"], one["drafters"]) for one in cells} == {
        (parameter, mix) for parameter in PARAMETERS for mix in COLUMNS
    }
    assert not [one for one in cells if one["faults"] or not one["tokens"]]
