"""Which nodes are worth their time: bought over all requests of a step by falling value.

A node's value is the probability that the target's path goes through it: the product of the
estimates along its own path (as in Sequoia and EAGLE-2). The k nodes of largest value are kept for
the k that makes expected tokens a second largest, given what a step of so many rows takes. k = 0 is
plain decoding, so under load, where a row costs what it gains, speculation fades out by itself.
Formula: docs/algorithms/token_trees.md, "Node budget".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Float64
from ..tree.acceptance_table import AcceptanceTable
from ..tree.kernels import mean_of_ranks
from ..tree.tree import TokenTree, TreeBatch, attribute

# Weight of the newest step in what drafting is expected to bring and to take.
WEIGHT = 0.1
# Trees of a step that the estimates learn from.
LEARNED_TREES = 4
# Every so many steps that did not ask, drafters are asked again: texts and loads change.
EXPLORE_EVERY = 32
# Rows at which the curve is kept.
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
# Weight of a new measurement.
COST_WEIGHT = 0.1
# One step that took so many times longer than expected tells of the machine, not of its rows.
OUTLIER = 3.0
# Weight of the newest step in what a drafter is expected to bring.
SHARE_WEIGHT = 0.05
# A drafter is left out only where it clearly costs more than it brings.
MARGIN = 0.9
# Steps that a new drafter gets to prove itself.
TRIAL_STEPS = 16
# After so many steps without it, a drafter gets some more: texts change.
RETRY_EVERY = 96
RETRY_STEPS = 4


@dataclass(slots=True)
class StepOutcome:
    """What a step took and brought; counted while it is committed.

    asked  drafters that were asked for it
    costs  seconds that each drafter takes
    """

    num_rows: int
    seconds: float
    asked: frozenset[str]
    costs: Mapping[str, float]
    num_tokens: int = 0
    trees: Sequence[TokenTree] = ()
    rows: Sequence[Sequence[int]] = ()

    def count(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]]) -> None:
        """Count the requests' committed rows: 0 is the root, node i is row i + 1.

        None of a request that ended meanwhile.
        """
        self.num_tokens = sum(map(len, rows))
        self.trees, self.rows = trees, rows


class NodeBudget:
    """Decides before a step whether drafters are asked, and then which nodes go into it."""

    __slots__ = (
        "_draft_s", "_is_adaptive", "_num_learned", "_profile", "_sources", "_step_s",
        "_steps_unasked", "_tokens", "cost", "table",
    )  # fmt: skip

    def __init__(
        self, max_nodes: int, cost: StepCost | None = None, *, is_adaptive: bool = True
    ) -> None:
        """`max_nodes`: most nodes of one request's tree; without `cost`, rows cost nothing.

        One that is not adaptive asks every drafter and keeps all nodes that fit, at any cost.
        """
        self._is_adaptive = is_adaptive
        self.table = AcceptanceTable()
        self.cost = cost or StepCost([1], [1.0])
        # Mean value of a request's best node, its second best, and so on; at first every one is
        # taken for worth it, so that the first steps find out.
        self._profile = np.ones(max_nodes)
        self._draft_s = 0.0
        self._steps_unasked = 0
        self._num_learned = 0
        self._sources = SourceChoice()
        self._step_s = 0.0
        self._tokens = 0.0

    def whom_to_ask(
        self, costs: Mapping[str, float], num_requests: int, num_other_rows: int
    ) -> frozenset[str]:
        """Drafters that the next step asks; none where drafting is not worth its time.

        costs           seconds that each drafter takes in a step, by name
        num_requests    decoding requests that take drafts
        num_other_rows  rows of the step besides theirs
        """
        if not self._is_adaptive:
            return frozenset(costs)
        seconds_a_token = (self._step_s + self._draft_s) / max(self._tokens, 1.0)
        asked = costs.keys() - self._sources.left_out(costs, seconds_a_token)
        if asked and self._is_worth_it(num_requests, num_other_rows):
            return frozenset(asked)
        self._steps_unasked += 1
        return frozenset()

    def note_asked(self, trees: Sequence[TokenTree], draft_s: float) -> None:
        """Learn from the drafters' trees, before any cut, and from the seconds that they took."""
        self._steps_unasked = 0
        self._draft_s += WEIGHT * (draft_s - self._draft_s)
        batch = TreeBatch.of(trees)
        means = mean_of_ranks(batch.values, batch.node_ends, len(self._profile))
        self._profile += WEIGHT * (means - self._profile)

    def note_step(self, outcome: StepOutcome) -> None:
        """Learn from a step that was committed."""
        self._num_learned = 0
        if outcome.seconds > 0:
            self.cost.record(outcome.num_rows, outcome.seconds)
        if outcome.num_tokens:
            weight = WEIGHT if self._tokens else 1.0
            self._step_s += weight * (outcome.seconds - self._step_s)
            self._tokens += weight * (outcome.num_tokens - self._tokens)
        self._sources.learn(outcome.costs, outcome.asked, self._credits(outcome))

    def learn(self, drafted: TokenTree, path_tokens: Sequence[int]) -> None:
        """Learn from a request's tree before it was cut, and the target's tokens after its root.

        `LEARNED_TREES` of a step are enough; the others are ignored.
        """
        if self._num_learned < LEARNED_TREES and len(drafted):
            self._num_learned += 1
            drafted.learn(self.table, path_tokens)

    def choose(
        self, trees: Sequence[TokenTree], limits: Sequence[int], num_other_rows: int
    ) -> TreeBatch:
        """The trees without the nodes that are not worth their rows.

        limits: most nodes of each tree
        """
        batch = TreeBatch.of(trees)
        kept = batch.best_of_each(limits)
        if not self._is_adaptive:
            return batch.keep(kept)
        # Stable, and a node is worth no more than its parent: parents stay where children do.
        order = np.argsort(-np.where(kept, batch.values, -1.0), kind="stable")
        order = order[: np.count_nonzero(kept)]
        tokens = len(trees) + _sums(batch.values[order])
        rows = len(trees) + num_other_rows + np.arange(len(tokens))
        kept[:] = False
        kept[order[: int(np.argmax(tokens / self.cost.seconds(rows)))]] = True
        return batch.keep(kept)

    def _credits(self, outcome: StepOutcome) -> dict[str, int]:
        """The accepted nodes of each drafter; of several that proposed one, the cheapest has it."""
        names = self.table.names
        costs = np.array([outcome.costs.get(name, 0.0) for name in names])
        return dict(zip(names, attribute(outcome.trees, outcome.rows, costs), strict=True))

    def _is_worth_it(self, num_requests: int, num_other_rows: int) -> bool:
        if self._steps_unasked >= EXPLORE_EVERY:
            return True
        count = np.arange(len(self._profile) + 1)
        tokens = num_requests * (1.0 + _sums(self._profile))
        rows = num_requests * (1.0 + count) + num_other_rows
        rates = tokens / (self.cost.seconds(rows) + self._draft_s)
        plain = num_requests / self.cost.seconds(num_requests + num_other_rows)
        return bool(rates.max() > plain)


def _sums(values: Float64) -> Float64:
    """float64 [n + 1]: of none of the values, of the first, of the first two, and so on."""
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    return sums


class StepCost:
    """step time = f(rows), piecewise linear over a grid, never falling, and learning."""

    __slots__ = ("_curve", "_grid", "_is_stale", "_seconds")

    def __init__(self, rows: list[int], seconds: list[float]) -> None:
        """Begin with measurements at some numbers of rows, at least one; `rows` rises."""
        assert rows
        self._grid = np.array(GRID, dtype=np.float64)
        self._seconds = np.interp(self._grid, rows, seconds)
        if len(rows) > 1:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]))
            beyond = self._grid > rows[-1]
            self._seconds[beyond] = seconds[-1] + slope * (self._grid[beyond] - rows[-1])
        self._is_stale = True
        self._curve = self._seconds

    def seconds(self, rows: npt.ArrayLike) -> Float64:
        """Expected seconds of steps with so many rows, in the shape of `rows`."""
        if self._is_stale:
            # Noise must not make more rows seem cheaper than fewer.
            rising = np.maximum.accumulate(self._seconds)
            falling = np.minimum.accumulate(self._seconds[::-1])[::-1]
            self._curve = (rising + falling) / 2
            self._is_stale = False
        return np.asarray(np.interp(np.asarray(rows), self._grid, self._curve))

    def record(self, rows: int, seconds: float) -> None:
        """Learn that a step of `rows` rows took `seconds`."""
        expected = float(self.seconds(rows))
        error = min(seconds, OUTLIER * expected) - expected
        right = int(np.searchsorted(self._grid, rows))
        left = max(0, right - 1)
        right = min(right, len(self._grid) - 1)
        span = self._grid[right] - self._grid[left]
        share = 1.0 if span == 0 else float(np.clip((rows - self._grid[left]) / span, 0, 1))
        self._seconds[left] += SHARE_WEIGHT * (1 - share) * error
        self._seconds[right] += SHARE_WEIGHT * share * error
        self._is_stale = True


class SourceChoice:
    """Compares the tokens that only a drafter brings with the seconds that it takes, step by step.

    An accepted node that several drafters proposed is attributed to the one that takes least time,
    so that of two alike the dearer one is left out.
    """

    __slots__ = ("_asked", "_gains", "_unasked")

    def __init__(self) -> None:
        self._gains: dict[str, float] = {}
        self._asked: dict[str, int] = {}
        self._unasked: dict[str, int] = {}

    def left_out(self, costs: Mapping[str, float], seconds_a_token: float) -> frozenset[str]:
        """Drafters that this step goes without.

        costs            seconds that each drafter takes in a step
        seconds_a_token  what an accepted token saves
        """
        out = set()
        for source, cost in costs.items():
            is_known = self._asked.get(source, 0) >= TRIAL_STEPS
            if is_known and self._gains[source] * seconds_a_token < MARGIN * cost:
                out.add(source)
                self._unasked[source] = self._unasked.get(source, 0) + 1
                if self._unasked[source] == RETRY_EVERY:
                    self._unasked[source] = 0
                    self._asked[source] = TRIAL_STEPS - RETRY_STEPS
        return frozenset(out)

    def learn(
        self, costs: Mapping[str, float], asked: Collection[str], accepted: Mapping[str, int]
    ) -> None:
        """Learn from a step: which drafters it asked, and the accepted nodes of each."""
        for source in asked:
            if source in costs:
                count = self._asked[source] = self._asked.get(source, 0) + 1
                old = self._gains.get(source, 0.0)
                weight = max(SHARE_WEIGHT, 1 / count)
                self._gains[source] = old + weight * (accepted.get(source, 0) - old)
