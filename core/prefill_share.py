"""How many rows of long prompts a step may hold beside answers that are being generated.

A long prompt is cached in chunks beside them (chunked prefill, Sarathi-Serve, arXiv 2403.02310,
section 4.2). Its rows are bounded by time and not by number: a row of a long prompt takes more time
the further it stands in the prompt, and a row costs less beside many answers than beside one.
"""

from __future__ import annotations

from collections.abc import Callable

# Weight of the newest step in what steps of trees take.
WEIGHT = 0.1
# And of the newest step with prompts in whether these keep to their share.
PROMPT_WEIGHT = 0.25
# How much of an error is mended at once: several steps are under way before one is answered.
GAIN = 0.15
# A prompt's row takes at most so many times what a row of a tree takes, and at least half of it.
DEAREST, CHEAPEST = 256.0, 0.5
# So many are always taken: prompts get on, whatever they take.
LEAST_ROWS = 8


class PrefillShare:
    """Bounds the share of a stage's time that goes to prompts while answers are generated."""

    __slots__ = (
        "_allowed_s", "_num_stages", "_scale", "_seconds", "_share", "_share_now", "_taken_s",
        "_tree_rows", "_tree_s",
    )  # fmt: skip

    def __init__(self, share: float, seconds: Callable[[int], float], num_stages: int = 1) -> None:
        """What it goes by.

        share    of a stage's time, above 0; 1: no bound
        seconds  that a step of so many rows is expected to take, for the ratio of two such times
        """
        self._share = share
        self._seconds = seconds
        self._num_stages = num_stages
        # Rows of steps without prompts, and what a stage takes for one; 0 before it is known.
        self._tree_rows = 1.0
        self._tree_s = 0.0
        # Rows that prompts may have, as a part of those that they could if theirs cost what rows
        # of trees do.
        self._scale = 1.0
        self._share_now = share
        # Decayed sums over steps with prompts: what they took of a stage, and what they might.
        self._taken_s = self._allowed_s = 0.0

    def max_rows(
        self, num_tree_rows: int, room: int, *, num_prompts: int, num_answering: int
    ) -> int:
        """Most prompt rows of a step beside so many rows of trees, at most `room`.

        Long prompts, which fill several steps: short ones are best computed together, so that
        answers are generated in larger batches. Where many wait beside few answers, their share
        grows with their number. A step without trees counts as one with as many as steps have.

        num_prompts    requests whose long prompts are to be cached
        num_answering  requests that are generating their answers
        """
        if not num_answering or room <= 0:
            return max(room, 0)
        self._share_now = max(self._share, (num_prompts - 1) / (num_prompts + num_answering))
        tree_rows = num_tree_rows or round(self._tree_rows)
        # Measured with one step at a time, that is of all stages: too much rather than too little.
        row_s = (self._seconds(tree_rows + room) - self._seconds(tree_rows)) / room
        if self._share_now >= 1.0 or row_s <= 0:
            return room
        prompts_s = self._stage_s(tree_rows) * self._share_now / (1.0 - self._share_now)
        rows = self._scale * prompts_s / row_s
        return min(room, max(LEAST_ROWS, int(rows)))

    def note_step(
        self, num_tree_rows: int, num_prompt_rows: int, seconds: float, num_in_flight: int = 1
    ) -> None:
        """Learn from an answered step.

        seconds        since it was sent, or the step before it was answered
        num_in_flight  steps that were under way, with this one: of as many as there are stages,
                       each is answered when a stage has done it; one alone, when all have
        """
        stage_s = seconds * min(num_in_flight, self._num_stages) / self._num_stages
        if not num_prompt_rows:
            weight = WEIGHT if self._tree_s else 1.0
            self._tree_rows += weight * (num_tree_rows - self._tree_rows)
            self._tree_s += weight * (stage_s - self._tree_s)
        elif self._share_now < 1.0:
            tree_s = self._stage_s(num_tree_rows or round(self._tree_rows))
            self._taken_s += stage_s - PROMPT_WEIGHT * self._taken_s
            self._allowed_s += tree_s / (1.0 - self._share_now) - PROMPT_WEIGHT * self._allowed_s
            if self._taken_s > 0:
                scale = self._scale * (self._allowed_s / self._taken_s) ** GAIN
                self._scale = min(max(scale, 1 / DEAREST), self._num_stages / CHEAPEST)

    def _stage_s(self, num_tree_rows: int) -> float:
        """What a stage takes for a step of trees."""
        if not self._tree_s:
            return self._seconds(num_tree_rows) / self._num_stages
        ratio = self._seconds(num_tree_rows) / self._seconds(max(1, round(self._tree_rows)))
        return self._tree_s * ratio
