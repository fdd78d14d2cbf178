"""How long a round of the engine takes, by its requests and rows; measured while it runs.

A round is all that lies between two commits, but for the time that drafters take: building the
step, the pass, walking, committing and the host's work on every node. Formula:
docs/how-it-works.md, "Step cost".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arrays import Float64

# Rows at which the curve is kept.
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
# What a new round leaves of the weight of those before it.
DECAY = 0.98
# A round that took so many times longer than expected tells of the machine, not of its rows.
OUTLIER = 1.5
# When a number of requests is first measured, what was expected of it weighs as much as so many
# rounds.
PRIOR_ROUNDS = 4.0
# Rows that were bought tell what rows cost once they made so many squares of a round's time.
PRIOR_SQUARES = 0.5
# Rows take no less than this share of what they take on the idle pipeline. Else one slow round of
# few rows makes all others seem free, and the next round verifies hundreds.
LEAST_SLOPE = 0.5
# No round takes less than this share of what is usual.
LEAST_SHARE = 0.1


class StepCost:
    """seconds = f(requests, rows), never falling in rows.

    The curve of the rows is measured at the start, on an idle pipeline (`rows`, `seconds`). Rounds
    of a number of requests then say, by a line through their measurements, how much longer a
    round takes, and how much dearer rows beside one for each request are, than that curve says.
    Where no such rows were computed, they cost what they do beside other numbers of requests; what
    was never seen at all takes as much longer than the curve as a line over the numbers of requests
    says. Rounds of more requests take longer for other reasons than their rows, so they say nothing
    of what rows cost.
    """

    __slots__ = ("_curve", "_curves", "_fits", "_grid", "_measured", "_offsets", "_xx", "_xy")

    def __init__(self, rows: list[int], seconds: list[float]) -> None:
        """Begin with measurements at some numbers of rows, at least one; `rows` rises."""
        assert rows
        self._grid = np.array(GRID, dtype=np.float64)
        curve = np.interp(self._grid, rows, seconds)
        if len(rows) > 1:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]))
            beyond = self._grid > rows[-1]
            curve[beyond] = seconds[-1] + slope * (self._grid[beyond] - rows[-1])
        # Noise must not make more rows seem cheaper than fewer.
        rising = np.maximum.accumulate(curve)
        falling = np.minimum.accumulate(curve[::-1])[::-1]
        self._curve: Float64 = (rising + falling) / 2
        self._fits: dict[int, LineFit] = {}
        # What a step asks several times: curves by requests since the last round, and `_at`.
        self._curves: dict[int, Float64] = {}
        self._measured: dict[int, float] = {}
        # Of all numbers of requests, each about its own means.
        self._xx = self._xy = 0.0
        self._offsets = LineFit(DECAY)

    @property
    def grid(self) -> Float64:
        """The numbers of rows that `curve` is given at; float64, rising."""
        return self._grid

    def curve(self, num_requests: int) -> Float64:
        """Expected seconds of rounds of so many requests at the rows of `grid`; read only."""
        curve = self._curves.get(num_requests)
        if curve is None:
            curve = self._curves[num_requests] = self._expected(num_requests)
        return curve

    def _expected(self, num_requests: int) -> Float64:
        fit = self._fits.get(bucket_of(num_requests))
        if fit is None:
            return self._unseen(num_requests, self._curve)
        plain = self._at(num_requests)
        slope = max(LEAST_SLOPE, fit.slope(self._slope, PRIOR_SQUARES * plain * plain))
        usual = plain + fit.mean_y
        seconds = usual + slope * (self._curve - plain - fit.mean_x)
        return np.maximum(seconds, LEAST_SHARE * usual)

    def seconds(self, num_requests: int, rows: npt.ArrayLike) -> Float64:
        """Expected seconds of rounds with so many rows, in the shape of `rows`."""
        return np.asarray(np.interp(np.asarray(rows), self._grid, self.curve(num_requests)))

    def idle_seconds(self, rows: int) -> float:
        """Seconds of a pass of so many rows as measured at the start, on the idle pipeline."""
        return self._at(rows)

    def record(self, num_requests: int, rows: int, seconds: float) -> None:
        """Learn that a round of so many decoding requests and `rows` rows took `seconds`."""
        expected = float(self.seconds(num_requests, rows))
        seconds = min(seconds, OUTLIER * expected) if expected > 0 else seconds
        plain = self._at(num_requests)
        # Of the rows beside one for each request, by the curve.
        more = self._at(rows) - plain
        fit = self._fits.get(bucket_of(num_requests))
        if fit is None:
            fit = self._fits[bucket_of(num_requests)] = LineFit(DECAY)
            fit.record(more, expected - plain, PRIOR_ROUNDS)
        xx, xy = fit.record(more, seconds - plain)
        self._xx = DECAY * self._xx + xx
        self._xy = DECAY * self._xy + xy
        self._offsets.record(num_requests, seconds - plain - self._slope * more)
        self._curves.clear()

    @property
    def _slope(self) -> float:
        """How much dearer rows are than the curve says, whatever the number of requests."""
        prior = PRIOR_SQUARES * float(self._curve[0]) ** 2
        return max(LEAST_SLOPE, (self._xy + prior) / (self._xx + prior))

    def _unseen(self, num_requests: int, measured: npt.ArrayLike) -> Float64:
        """What rounds take that the curve says `measured` of, as other numbers of requests tell."""
        line, plain = self._offsets, self._at(num_requests)
        away = num_requests - line.mean_x
        offset = line.mean_y + line.slope(0.0, num_requests**2) * away
        measured = np.asarray(measured)
        seconds = plain + offset + self._slope * (measured - plain)
        return np.maximum(seconds, LEAST_SHARE * measured)

    def _at(self, rows: int) -> float:
        seconds = self._measured.get(rows)
        if seconds is None:
            seconds = self._measured[rows] = float(np.interp(rows, self._grid, self._curve))
        return seconds


def bucket_of(num_requests: int) -> int:
    """Numbers of requests that are alike: up to 8 each its own, then steps of an eighth."""
    if num_requests <= 8:
        return num_requests
    shift = num_requests.bit_length() - 4
    return (num_requests >> shift) << shift


class LineFit:
    """y = mean_y + slope * (x - mean_x), by least squares with weights that fall by `decay`.

    The slope is drawn to a prior where the x hardly differ: a line through one point has any.
    """

    __slots__ = ("_decay", "_xx", "_xy", "mean_x", "mean_y", "weight")

    def __init__(self, decay: float) -> None:
        """`decay`: 0 to 1, what one more measurement leaves of the weight of those before it."""
        self._decay = decay
        self.weight = 0.0
        self.mean_x = self.mean_y = 0.0
        self._xx = self._xy = 0.0

    def record(self, x: float, y: float, weight: float = 1.0) -> tuple[float, float]:
        """Learn that `x` gave `y`; the squares that it adds: of x by x, and of x by y."""
        self.weight = self._decay * self.weight + weight
        share = weight / self.weight
        before = x - self.mean_x
        self.mean_x += share * before
        self.mean_y += share * (y - self.mean_y)
        squares = weight * before * (x - self.mean_x), weight * before * (y - self.mean_y)
        self._xx = self._decay * self._xx + squares[0]
        self._xy = self._decay * self._xy + squares[1]
        return squares

    def slope(self, prior: float, prior_xx: float) -> float:
        """The slope, not below 0; `prior` counts as much as squares of x that sum to `prior_xx`."""
        return max(0.0, (self._xy + prior_xx * prior) / (self._xx + prior_xx))

    def parts(self, prior_xx: float) -> tuple[float, float]:
        """What y is without any x, and what each adds; neither is below 0.

        Where the x hardly differ, half of y is theirs; `prior_xx` as of `slope`.
        """
        if not self.weight:
            return 0.0, 0.0
        mean_each = self.mean_y / max(self.mean_x, 1.0)
        each = min(self.slope(0.5 * mean_each, prior_xx), mean_each)
        return self.mean_y - each * self.mean_x, each
