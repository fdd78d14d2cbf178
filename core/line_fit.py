"""A straight line through measurements, of which old ones count less and less."""

from __future__ import annotations


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
