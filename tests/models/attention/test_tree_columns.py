"""What rows of trees see is the same, whether the trees are arrays or `TreeRows`."""

from __future__ import annotations

import numpy as np
from draftline.models.attention.operator import columns_of
from support.inputs.engine_steps import engine_steps, two_ways


async def test_columns_are_those_of_single_trees() -> None:
    steps = await engine_steps()
    assert any(step.trees[0] is not None and None in list(step.trees) for step in steps)
    for step in steps:
        for found, expected in zip(*map(columns_of, two_ways(step)), strict=True):
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == expected.dtype
