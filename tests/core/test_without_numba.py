"""Without numba the same loops run in plain Python, and say so."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from draftline.core.compiled import address_of, int32_rows_at, plain_carray

PROGRAM = """
import logging, sys
logging.basicConfig(format="%(message)s")
sys.modules["numba"] = None
import numpy as np
from draftline.core.compiled import address_of, compiled, int32_rows_at
from draftline.core.tree.tree import pack, unpack
visible = np.tri(70, dtype=np.bool_)
assert (unpack(pack(visible), 70) == visible).all()
rows = np.arange(6, dtype=np.int32).reshape(2, 3)
view = int32_rows_at(address_of(rows), 2, 3)
rows[1, 2] = 9
print(view.tolist())

@compiled
def twice(x):
    return x * np.int64(2)

# Sums wrap, without a warning.
assert twice(np.int64(2**62)) == -(2**63)
"""


def test_without_numba_loops_run_as_they_are_written() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, check=False, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[[0, 1, 2], [3, 4, 9]]\n"
    assert "event=not_compiled" in result.stderr
    assert "plain Python" in result.stderr


def test_both_ways_see_the_same_arrays() -> None:
    rows = np.arange(12, dtype=np.int32).reshape(3, 4)
    ours = plain_carray(address_of(rows), (3, 4), np.int32)
    np.testing.assert_array_equal(ours, int32_rows_at(address_of(rows), 3, 4))
    ours[2, 1] = 77
    assert rows[2, 1] == 77
