"""What is worth its time: drafters that are asked for a request, and nodes that are verified.

A node's value is the probability that the target's path goes through it: the product of the
estimates along its own path (as in Sequoia and EAGLE-2). The k nodes of largest value are kept for
the k that makes expected tokens a second largest, given what a round of so many rows takes. k = 0
is plain decoding, so under load, where a row costs what it gains, speculation fades out by itself.
Formula: docs/how-it-works.md, "The policy".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..arrays import Float64
from ..errors import BestEffort
from ..proposals import DraftCost, Proposal, chain_proposal
from ..step.ask_plan import AskPlan, DraftBatch
from ..tree.acceptance_table import AcceptanceTable
from ..tree.hazards import values_under
from ..tree.merge import merge
from ..tree.tree import TokenTree, TreeBatch, empty_trees
from ..verify.walk import Paths
from .choice.drafter_choice import NOBODY, DrafterChoice, Verified
from .choice.prices import Prices
from .choice.wishes import DraftWish, everyone
from .hindsight import Hindsight
from .line_fit import LineFit
from .multi_step import MultiStep
from .step_cost import StepCost

# Weight of the newest round in the ratio of seconds a token to those of plain decoding.
RATIO_WEIGHT = 0.02
# Tokens never count for less than this share of what they take in plain decoding.
LEAST_RATIO = 0.1
# What a step leaves of the weight of those before it, of the host's work for requests with drafts;
# and squares of their number that a guess counts for: half of the work is theirs.
HOST_DECAY = 0.95
HOST_SQUARES = 16.0
# Work that took so many times longer than the mean tells of the machine; of the first, which may
# have loaded anything, no more is believed.
HOST_OUTLIER, FIRST_HOST_S = 4.0, 2e-3
# Rows that the price of one is taken of.
SHARED_ROWS = 32


@dataclass(slots=True)
class StepOutcome:
    """What a step took and brought; counted while it is committed.

    seconds          of its pass
    num_prompt_rows  of its rows
    num_passes       tokens of each request, where no drafts were verified
    ahead_s          of its seconds, that went into drafts for the next step
    is_streamed      whether it held slices of trees: its seconds are no round's
    followers        ids of requests whose slices went behind others: what their drafters bring
                     there is not what they bring a round
    """

    num_rows: int
    seconds: float
    num_prompt_rows: int
    draft_batch: DraftBatch
    num_passes: int = 1
    ahead_s: float = 0.0
    is_streamed: bool = False
    followers: frozenset[str] = frozenset()
    num_tokens: int = 0
    ids: Sequence[str] = ()
    trees: Sequence[TokenTree] = ()
    paths: Paths = field(default_factory=lambda: Paths.of(()))
    verified: Paths = field(default_factory=lambda: Paths.of(()))
    drafted: TreeBatch = field(default_factory=lambda: empty_trees(0))

    def count(
        self,
        ids: Sequence[str],
        trees: Sequence[TokenTree],
        drafted: TreeBatch,
        paths: Paths,
        verified: Paths | None = None,
    ) -> None:
        """Count what the requests committed; nothing of one that ended meanwhile.

        drafted   the trees before they were cut
        paths     through these
        verified  the same by the rows of `trees`; None: as `paths` has them
        """
        self.num_tokens = len(paths.tokens)
        self.verified = paths if verified is None else verified
        self.ids, self.trees, self.drafted, self.paths = ids, trees, drafted, paths


class NodeBudget:
    """Decides before a step who is asked, and then which nodes go into it."""

    __slots__ = (
        "_best_effort", "_committed_at", "_drafters", "_hindsight", "_host", "_host_s", "_idle_s",
        "_is_adaptive", "_is_ordered", "_last_passes", "_multi_step", "_plain_s", "_spent_s",
        "cost", "table",
    )  # fmt: skip

    def __init__(
        self,
        cost: StepCost | None = None,
        *,
        is_adaptive: bool = True,
        is_ordered: bool = False,
        multi_step: MultiStep | None = None,
    ) -> None:
        """Without `cost`, rows cost nothing until rounds have been measured; without `multi_step`,
        a step without drafts decodes a token of each request.

        One that is not adaptive asks every drafter and keeps all nodes that fit, at any cost: the
        most valuable ones, or if `is_ordered` those that come first in the order of drafters.
        """
        self._is_adaptive = is_adaptive
        self._is_ordered = is_ordered
        self.table = AcceptanceTable()
        self.cost = cost or StepCost([1], [1.0])
        self._multi_step = multi_step or MultiStep()
        self._drafters = DrafterChoice()
        # Of late: seconds of rounds, and seconds that plain decoding takes for as many tokens.
        self._spent_s = self._plain_s = 0.0
        self._hindsight = Hindsight()
        self._host = LineFit(HOST_DECAY)
        # Since the last commit.
        self._host_s = 0.0
        # In steps that asked nobody, since one that did.
        self._idle_s = 0.0
        self._committed_at = 0.0
        # Tokens of each request in the step that was committed last.
        self._last_passes = 1
        self._best_effort = BestEffort()

    def plan(
        self,
        wishes: Sequence[DraftWish],
        costs: Mapping[str, DraftCost],
        num_other_rows: int,
        *,
        may_decode_several: bool = True,
    ) -> AskPlan:
        """Who is asked for which of the requests that take drafts.

        costs           of each drafter, by name
        num_other_rows  rows of the step besides the roots of these requests
        may_decode_several  whether a step without drafts may decode several tokens of each
        """
        if not self._is_adaptive:
            return everyone(wishes, costs)
        self._know(costs)
        num_requests = len(wishes)
        base_rows = num_requests + num_other_rows
        curve = self.cost.curve(num_requests)
        # Without the other rows: a token more saves a later round's share, not these.
        round_s = self._round_s(num_requests, may_decode_several)
        prices = Prices(
            token_s=self._ratio * round_s / num_requests,
            plain_s=round_s / num_requests,
            round_s=round_s,
            grid=self.cost.grid,
            curve_s=curve,
            base_rows=base_rows,
            host_s=self._host.parts(HOST_SQUARES),
            single_s=max(float(self.cost.seconds(num_requests, num_requests)) - round_s, 0.0),
        )
        with self._best_effort:
            return self._drafters.plan(wishes, costs, prices)
        return AskPlan({}, {})

    def is_quiet(self, ids: Iterable[str]) -> bool:
        """Whether nobody is asked for a step of these requests, without a plan for it.

        So it is for a while after plans that asked nobody for them.
        """
        return self._is_adaptive and self._drafters.is_quiet(ids, self._last_passes)

    def expected(
        self, wish: DraftWish, costs: Mapping[str, DraftCost], num_running: int
    ) -> frozenset[str]:
        """Drafters that will be asked for a new request, as far as its like tell."""
        if not self._is_adaptive:
            return frozenset(everyone([wish], costs).by_drafter)
        self._know(costs)
        plain_s = self._round_s(num_running) / max(num_running, 1)
        with self._best_effort:
            return self._drafters.expected(wish, costs, plain_s)
        return frozenset()

    def forget(self, request_id: str) -> None:
        """A request has ended; an unknown id is ignored."""
        self._drafters.forget(request_id)
        self._hindsight.forget(request_id)

    def note_host(self, seconds: float) -> None:
        """Count what the host did for requests with drafts: planning, merging, judging."""
        self._host_s += seconds

    def note_probe(self, drafter: str, num_rows: int) -> None:
        """Learn how many rows a drafter wants to probe with, whether it may or not."""
        if self._is_adaptive:
            self._drafters.note_probe(drafter, num_rows)

    def note_step(self, outcome: StepOutcome, now: float) -> None:
        """Learn from a step that was committed; `now` is when, by the engine's clock.

        A round lasts from the commit before, or from its own planning where the engine was idle.
        """
        with self._best_effort:
            self._note_step(outcome, now)

    def judge(self, outcome: StepOutcome) -> None:
        """Learn which drafted nodes were right, and what drafters brought, of a step that was
        counted, before any of its requests ends.
        """
        with self._best_effort:
            if self._is_adaptive and outcome.trees:
                self._learn_drafters(outcome)
            self._learn_values(outcome)

    def _note_step(self, outcome: StepOutcome, now: float) -> None:
        before, self._committed_at = self._committed_at, now
        host_s, self._host_s = self._host_s, 0.0
        self._learn_host(len(outcome.draft_batch.by_request), host_s)
        is_alone = outcome.draft_batch.began_at >= before
        round_s = now - max(before, outcome.draft_batch.began_at)
        # While other steps are on their way, drafters are asked in the time of these.
        drafting_s = outcome.draft_batch.seconds + host_s
        rest_s = (round_s - drafting_s if is_alone else outcome.seconds) - outcome.ahead_s
        num_requests = len(outcome.trees)
        is_round = bool(num_requests) and not (outcome.num_prompt_rows or outcome.is_streamed)
        if round_s > 0 and is_round:
            self._learn_round(outcome, num_requests, round_s, max(rest_s, 0.0))
        elif outcome.is_streamed:
            # Time that may be spent on trying passes in slices, too.
            self._drafters.pass_time(now - before, self._round_s(num_requests))
        self._last_passes = outcome.num_passes

    def _learn_values(self, outcome: StepOutcome) -> None:
        ids, drafted, paths = outcome.ids, outcome.drafted, outcome.paths
        if not self._hindsight.has_work(drafted):
            return
        ratios = self._drafters.hazard_ratios(ids) if self._is_adaptive else np.ones(len(ids))
        judged = self._hindsight.judge(ids, drafted, paths, self.table.counts, ratios)
        if self._is_adaptive and judged.any():
            self._drafters.calibrate(ids, judged)

    def choose(
        self,
        trees: Sequence[TokenTree],
        limits: Sequence[int],
        num_other_rows: int,
        *,
        ids: Sequence[str] = (),
        spent_s: float = 0.0,
        may_decode_several: bool = True,
    ) -> TreeBatch:
        """The trees without the nodes that are not worth their rows.

        limits   most nodes of each tree
        ids      of their requests, whose own acceptance counts
        spent_s  seconds that drafting took for them
        may_decode_several  as of `plan`
        """
        batch = TreeBatch.of(trees)
        kept = batch.best_of_each(limits)
        if not self._is_adaptive or not len(batch.values):
            return batch.keep(kept)
        values = batch.values
        if ids:
            ratios = self._drafters.hazard_ratios(ids)
            values = values_under(batch.nodes, values, batch.node_ends, ratios)
        # Stable, and a node is worth no more than its parent: parents stay where children do.
        order = np.argsort(-np.where(kept, values, -1.0), kind="stable")
        order = order[: np.count_nonzero(kept)]
        tokens = len(batch) + _sums(values[order])
        rows = len(batch) + num_other_rows + np.arange(len(tokens))
        seconds = self.cost.seconds(len(batch), rows)
        plain_s = self._round_s(len(batch), may_decode_several)
        if num_other_rows:
            # They are there whatever is bought, and no token pays for them.
            seconds += plain_s - seconds[0]
        seconds[0] = plain_s
        seconds += spent_s
        kept[:] = False
        kept[order[: int(np.argmax(tokens / seconds))]] = True
        return batch.keep(kept)

    def num_worth(self, values: Float64) -> int:
        """How many of one request's nodes, of falling `values`, make expected tokens a second
        largest; all of them where trees are full."""
        if not self._is_adaptive:
            return len(values)
        tokens = 1.0 + _sums(values)
        return int(np.argmax(tokens / self.cost.seconds(1, 1 + np.arange(len(tokens)))))

    def num_offered(self, proposals: Sequence[Proposal], max_nodes: int) -> int:
        """The nodes of a tree that is made to choose from: all that drafters propose, so that who
        comes first takes no room from others."""
        return max_nodes if self._is_ordered else sum(len(p.tokens) for p in proposals)

    @property
    def row_share(self) -> float:
        """What a row takes beside the first, as a share of a round; 0 where nodes cost nothing."""
        if not self._is_adaptive:
            return 0.0
        alone, beside = (float(self.cost.seconds(1, rows)) for rows in (1, 1 + SHARED_ROWS))
        return max(0.0, beside - alone) / (SHARED_ROWS * alone)

    def num_decode_steps(self, num_requests: int, most: int) -> int:
        """Tokens of each request, at most `most`, in a step without drafts and prompts."""
        return self._multi_step.num_steps(num_requests, self.cost, most)

    def _round_s(self, num_requests: int, may_decode_several: bool = True) -> float:
        """Seconds of plain decoding for a token of each request."""
        if may_decode_several:
            return self._multi_step.round_s(num_requests, self.cost)
        return float(self.cost.seconds(num_requests, num_requests))

    @property
    def _ratio(self) -> float:
        """Seconds a token of late, over those of plain decoding."""
        if not self._plain_s:
            return 1.0
        return float(np.clip(self._spent_s / self._plain_s, LEAST_RATIO, 1.0))

    def _know(self, costs: Mapping[str, DraftCost]) -> None:
        for name in costs:
            self.table.source_id(name)
        self._drafters.use(self.table.names)

    def _learn_host(self, num_asked: int, host_s: float) -> None:
        if not num_asked:
            self._idle_s += host_s
            return
        usual_s = HOST_OUTLIER * self._host.mean_y or FIRST_HOST_S
        self._host.record(num_asked, min(host_s, usual_s))
        # Plans that asked nobody were made for the trials that come, which pay for as much again
        # at most: otherwise the rarer they are the dearer they would seem, and would end.
        self._drafters.charge_host(min(self._idle_s, host_s))
        self._idle_s = 0.0

    def _learn_round(
        self, outcome: StepOutcome, num_requests: int, round_s: float, rest_s: float
    ) -> None:
        if rest_s and outcome.num_passes > 1:
            passes = outcome.num_passes
            each_s = self._multi_step.record(num_requests, passes, rest_s, self.cost)
            # A round of one token takes no less: what is known of it is of shorter contexts.
            if each_s > self.cost.seconds(num_requests, num_requests):
                self.cost.record(num_requests, num_requests, each_s)
        elif rest_s and self._last_passes == 1:
            # One behind a step of several tokens also waits until these have been sent on.
            self.cost.record(num_requests, outcome.num_rows, rest_s)
        plain_s = self._round_s(num_requests)
        tokens = outcome.num_tokens / num_requests
        self._spent_s += RATIO_WEIGHT * (round_s - self._spent_s)
        self._plain_s += RATIO_WEIGHT * (plain_s * tokens - self._plain_s)
        self._drafters.pass_time(round_s, plain_s)

    def _learn_drafters(self, outcome: StepOutcome) -> None:
        if not outcome.draft_batch.plan.by_drafter:
            return
        count, num_nodes = len(outcome.trees), len(TreeBatch.of(outcome.trees).values)
        extra_s = float(self.cost.seconds(count, count + num_nodes)) - self._round_s(count)
        self._drafters.use(self.table.names)
        ids = [NOBODY if one in outcome.followers else one for one in outcome.ids]
        self._drafters.learn(
            outcome.draft_batch.plan_heard(self.table.names),
            outcome.draft_batch.costs,
            Verified(ids, outcome.trees, outcome.verified, max(extra_s, 0.0)),
        )


def _sums(values: Float64) -> Float64:
    """float64 [n + 1]: of none of the values, of the first, of the first two, and so on."""
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    return sums


def load_choice() -> None:
    """Compile the loops of the choice, or load them, so that no step waits for it."""
    budget, costs = NodeBudget(), {"any": DraftCost()}
    wish = DraftWish("any", 0.0, "any", None, 2, 2)
    budget.expected(wish, costs, 1)
    plan = budget.plan([wish], costs, 0)
    assert plan.by_drafter, "what is new and takes nothing is tried"
    tree = merge([chain_proposal("any", np.arange(2, dtype=np.int32))], 2, 2, budget.table)
    budget.choose([tree], [2], 0, ids=["any"])
    outcome = StepOutcome(2, 0.0, 0, DraftBatch({}, 0.0, 0.0, plan, costs))
    outcome.count(["any"], [tree], TreeBatch.of([tree]), Paths.of([[(0, 0, 0), (1, 1, -1)]]))
    budget.judge(outcome)
    budget.note_step(outcome, 1.0)
