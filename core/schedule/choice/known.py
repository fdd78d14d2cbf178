"""What is known of drafters, as arrays that compiled loops read and learn into."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...arrays import Bool, Float64, Int64
from ...compiled import compiled
from ...reach import NUM_REACHES

# Room for so many requests and classes at first.
FIRST_ROWS = 64
# The arrays of `Known` by row, and those of them that have a column for each drafter.
BY_ROW = ("levels", "failures", "paths", "is_open", "planned", "trials", "ordered", "ordered_after")
BY_ROW_AND_DRAFTER = ("levels", "is_open", "trials", "ordered", "ordered_after")
# Lower ends of the ranges of a row's price, in tokens.
REGIMES = (0.05, 0.15, 0.3, 0.6)
NUM_REGIMES = len(REGIMES) + 1
# Of each regime and reach (`core/reach.py`) it is known by itself what drafters bring.
NUM_CELLS = NUM_REGIMES * NUM_REACHES

ScalarT = TypeVar("ScalarT", bound=np.generic)


class Known(NamedTuple):
    """What is known of drafters; rows are of the engine (0), of classes and of requests.

    levels      float64 [rows, drafters, 1 + drafters, cells, 3]  decayed sums of the steps that
                asked a drafter, and another beside it, and of the nodes that it brought beyond
                that one (`kernels.py`); by `cell_of` the step and the request's reach before it
    failures    float64 [rows, 2]  decayed sums of wrong nodes that were the most probable, and of
                the hazard gone through
    paths       int64 [rows, 3]  the rows of the engine, the class and the request, of a request
    is_open     bool [rows, drafters]  whether a drafter knows a request
    planned     float64 [rows]  tokens of a request's text when it was planned last
    trials      int64 [rows, drafters]  steps that a request's probes are still tried for
    ordered     int64 [rows, drafters]  choices of the step before, of those who draft at its end
    ordered_after  int64, likewise  after which outcomes of it they do (bits of `core/reach.py`)
    outcomes    float64 [reaches]  decayed counts of the reaches of requests' steps
    costs       float64 [drafters, 3]  seconds of a message, a query and opening a token of text
    lift        float64 [drafters, 2]  decayed sums of steps with probes, and of what these brought
                more than usual
    probe_rows  float64 [drafters]  rows of a drafter's probes; 0: it sends none
    balance     float64 [drafters, 2]  seconds that may go into trying a drafter, and its probes
    host        float64 [1]  seconds that the host may work for steps in which drafters are only
                tried, whichever they are
    turns       int64 [drafters]  the place of the request that a drafter is tried for next
    """

    levels: Float64
    failures: Float64
    paths: Int64
    is_open: Bool
    planned: Float64
    trials: Int64
    ordered: Int64
    ordered_after: Int64
    outcomes: Float64
    costs: Float64
    lift: Float64
    probe_rows: Float64
    balance: Float64
    host: Float64
    turns: Int64


@compiled
def cell_of(regime: int, reach: int) -> int:
    """The place of a range of prices and a reach in `Known.levels`."""
    return regime * NUM_REACHES + reach


def nothing_known() -> Known:
    """Room for the first rows, and no drafter."""
    count = FIRST_ROWS
    return Known(
        levels=np.zeros((count, 0, 1, NUM_CELLS, 3)),
        failures=np.zeros((count, 2)),
        paths=np.zeros((count, 3), dtype=np.int64),
        is_open=np.zeros((count, 0), dtype=np.bool_),
        planned=np.zeros(count),
        trials=np.zeros((count, 0), dtype=np.int64),
        ordered=np.zeros((count, 0), dtype=np.int64),
        ordered_after=np.zeros((count, 0), dtype=np.int64),
        outcomes=np.ones(NUM_REACHES),
        costs=np.zeros((0, 3)),
        lift=np.zeros((0, 2)),
        probe_rows=np.zeros(0),
        balance=np.zeros((0, 2)),
        host=np.zeros(1),
        turns=np.zeros(0, dtype=np.int64),
    )


def padded(array: NDArray[ScalarT], axis: int, count: int) -> NDArray[ScalarT]:
    """The array with so many zeros more behind an axis."""
    shape = list(array.shape)
    shape[axis] = count
    return np.concatenate([array, np.zeros(shape, dtype=array.dtype)], axis=axis)
