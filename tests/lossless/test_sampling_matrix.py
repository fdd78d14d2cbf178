"""No parameter of sampling makes speculation change a token, and the page that says so is true."""

from __future__ import annotations

import pytest
from draftline.benchmarks.lossless.sampling_matrix import (
    COLUMNS,
    PAGE,
    PARAMETERS,
    TABLE_BEGIN,
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


def test_the_page_has_a_row_for_every_parameter() -> None:
    _, found, table = PAGE.read_text().partition(TABLE_BEGIN)
    assert found, "run the command that the page names"
    rows = [line for line in table.splitlines() if line.startswith("|")]
    names = [row.split("|")[1].strip() for row in rows]
    assert names == ["parameter", "---", *PARAMETERS]
    assert all(row.count("equal (") == len(COLUMNS) for row in rows[2:])
