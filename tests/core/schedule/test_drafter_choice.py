"""Engines on a clock that costs move: drafters are asked where they pay, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from draftline.core.proposals import AskPlan, DraftBatch, DraftCost, Proposal, chain_proposal
from draftline.core.schedule.budget import NodeBudget, StepOutcome
from draftline.core.schedule.choice.drafter_choice import EXPLORED_SHARE, DraftWish
from draftline.core.schedule.multi_step import MultiStep
from draftline.core.schedule.step_cost import StepCost
from draftline.core.tree.merge import merge_all
from draftline.core.verify.walk import Paths

# A pass of one row takes 10 ms, and each further row 0.4 ms.
CURVE = ([1, 101], [0.010, 0.050])
PROBE_ROWS = 11


@dataclass
class Guess:
    """A drafter that proposes a chain of `length`, of which `rate(request)` says how much is right.

    probes  it also probes; `lift` more of its tokens are right after a step that had the probes
    """

    rate: Callable[[str], float]
    length: int = 4
    cost: DraftCost = field(default_factory=lambda: DraftCost(0.0001, 0.0001, 0.0))
    probes: bool = False
    lift: float = 0.0


@dataclass
class Simulation:
    """Rounds of an engine: what is asked, bought and accepted decides how long they take."""

    guesses: dict[str, Guess]
    temperature: Callable[[str], float] = lambda _request: 0.0
    tokens_left: int = 100_000
    seed: int = 1
    multi_step: MultiStep = field(default_factory=MultiStep)
    curve: tuple[list[int], list[float]] = CURVE

    def __post_init__(self) -> None:
        self.budget = NodeBudget(StepCost(*self.curve), multi_step=self.multi_step)
        self.rng = np.random.default_rng(self.seed)
        self.now = 0.0
        self.num_tokens = 0
        # Seconds that each drafter took: its own, and its rows'.
        self.spent = dict.fromkeys(self.guesses, 0.0)
        self.num_asked: dict[tuple[str, str], int] = {}
        self.num_probes = 0
        self.num_plans = 0
        # What the target will say, whatever is drafted, and how much it has said.
        self.futures: dict[str, list[int]] = {}
        self.decoded: dict[str, int] = {}

    def run(self, requests: Sequence[str], seconds: float) -> float:
        """Tokens a second over plain decoding's, of so many seconds."""
        start, before = self.now, self.num_tokens
        while self.now < start + seconds:
            self.round(requests)
        plain = len(requests) / float(StepCost(*CURVE).seconds(len(requests), len(requests)))
        return (self.num_tokens - before) / (self.now - start) / plain

    def round(self, requests: Sequence[str]) -> None:
        costs = {name: guess.cost for name, guess in self.guesses.items()}
        wishes = [
            DraftWish(one, self.temperature(one), "shared", None, 100 + self.decoded.get(one, 0),
                      self.tokens_left)
            for one in requests
        ]  # fmt: skip
        began_at = self.now
        plan = AskPlan({}, {})
        if not self.budget.is_quiet(requests):
            plan = self.budget.plan(wishes, costs, 0)
            self.num_plans += 1
        offered, accepted = self._propose(requests, plan.by_drafter)
        draft_s = self._ask(plan.by_drafter)
        self.now += draft_s
        trees = merge_all(offered, [16] * len(requests), [16] * len(requests), self.budget.table)
        probes = [
            {name: PROBE_ROWS for name, ids in plan.probing.items()
             if one in ids and self.guesses[name].probes}
            for one in requests
        ]  # fmt: skip
        num_probe_rows = sum(sum(sent.values()) for sent in probes)
        self.num_probes += bool(num_probe_rows)
        kept = self.budget.choose(
            trees,
            [16] * len(requests),
            num_probe_rows,
            ids=requests,
            spent_s=draft_s,
        )
        num_rows = len(requests) + sum(map(len, kept)) + num_probe_rows
        num_passes = 1
        if num_rows == len(requests):
            num_passes = self.budget.num_decode_steps(len(requests), 32)
        seconds = self.pass_s(len(requests), num_rows, num_passes)
        self._charge(kept, probes)
        batch = DraftBatch({}, began_at, draft_s, plan, costs)
        outcome = StepOutcome(num_rows, seconds, 0, batch, num_passes)
        paths = []
        for name in plan.by_drafter:
            if self.guesses[name].probes:
                self.budget.note_probe(name, PROBE_ROWS)
        for one, tree in zip(requests, kept, strict=True):
            tree.check()
            rows = _walk(tree.tokens.tolist(), tree.parents.tolist(), accepted[one])
            rows += [0] * (num_passes - 1)
            self.decoded[one] = self.decoded.get(one, 0) + len(rows)
            paths.append(
                [(row, token, -1) for row, token in zip(rows, accepted[one], strict=False)]
            )
            del self.futures[one][: len(rows)]
        outcome.count(requests, kept, trees, Paths.of(paths))
        self.budget.judge(outcome)
        self.now += seconds
        self.num_tokens += outcome.num_tokens
        self.budget.note_step(outcome, self.now)

    def pass_s(self, num_requests: int, num_rows: int, num_passes: int) -> float:
        return float(num_passes * StepCost(*CURVE).seconds(num_requests, num_rows))

    def _propose(
        self, requests: Sequence[str], by_drafter: Mapping[str, Sequence[str]]
    ) -> tuple[list[list[Proposal]], dict[str, list[int]]]:
        """Chains whose tokens are the target's for as long as a drafter is right."""
        for one in requests:
            future = self.futures.setdefault(one, [])
            future += self.rng.integers(1, 10**6, 40 - len(future)).tolist()
        said = {one: self.futures[one].copy() for one in requests}
        offered: list[list[Proposal]] = []
        for one in requests:
            found = []
            for name, guess in self.guesses.items():
                if one not in by_drafter.get(name, ()):
                    continue
                num_right = 0
                while num_right < guess.length and self.rng.random() < guess.rate(one):
                    num_right += 1
                wrong = self.rng.integers(10**6, 10**7, guess.length - num_right).tolist()
                tokens = np.array([*said[one][:num_right], *wrong], dtype=np.int32)
                found.append(chain_proposal(name, tokens))
            offered.append(found)
        return offered, said

    def _ask(self, by_drafter: Mapping[str, Sequence[str]]) -> float:
        total = 0.0
        for name, ids in by_drafter.items():
            cost = self.guesses[name].cost
            seconds = cost.message_s + cost.query_s * len(ids)
            self.spent[name] += seconds
            total += seconds
            for one in ids:
                self.num_asked[name, one] = self.num_asked.get((name, one), 0) + 1
        return total

    def _charge(self, kept: Sequence, probes: Sequence[Mapping[str, int]]) -> None:
        row_s = (CURVE[1][1] - CURVE[1][0]) / 100
        for tree, sent in zip(kept, probes, strict=True):
            for name, count in tree.count_sources().items():
                self.spent[name] += count * row_s
            for name, count in sent.items():
                self.spent[name] += count * row_s


def _walk(tokens: list[int], parents: list[int], said: list[int]) -> list[int]:
    rows, last = [0], -1
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == last and len(rows) <= len(said) and token == said[len(rows) - 1]:
            rows.append(node + 1)
            last = node
    return rows


REQUESTS = tuple(f"r{index}" for index in range(8))


@pytest.mark.parametrize("requests", [REQUESTS[:1], REQUESTS], ids=["one", "eight"])
def test_a_drafter_that_never_brings_anything_costs_less_than_2_percent(
    requests: Sequence[str],
) -> None:
    simulation = Simulation({"useless": Guess(lambda _request: 0.0)})
    assert simulation.run(requests, 5.0) > 0.97
    before = simulation.spent["useless"]
    assert simulation.run(requests, 15.0) > 0.98
    # It is tried now and then.
    assert 0 < simulation.spent["useless"] - before < 0.02 * 15.0


def test_requests_that_are_tried_together_pay_for_their_message() -> None:
    cost = DraftCost(0.005, 0.00001, 0.0)
    simulation = Simulation({"useless": Guess(lambda _request: 0.0, cost=cost)})
    simulation.run(REQUESTS, 10.0)
    before = simulation.spent["useless"]
    simulation.run(REQUESTS, 40.0)
    assert 0 < simulation.spent["useless"] - before < 1.25 * EXPLORED_SHARE * 40.0


def test_where_nobody_pays_most_steps_go_without_a_plan() -> None:
    """Also where requests come and go, and where they take turns."""
    cost = DraftCost(0.001, 0.001, 0.0)
    simulation = Simulation({"useless": Guess(lambda _request: 0.0, cost=cost)})
    for index in range(200):
        requests = [f"r{index}", f"r{index + 1}"]
        wish = DraftWish(requests[1], 0.0, "shared", None, 100, 100)
        simulation.budget.expected(wish, {"useless": cost}, 2)
        for group in requests:
            simulation.round([group])
            simulation.round([group])
        simulation.budget.forget(requests[0])
    assert 0 < simulation.num_plans < 0.3 * 800
    assert len(simulation.budget._drafters._quiet._ids) <= 2


def test_a_new_request_of_which_something_is_expected_is_planned_at_once() -> None:
    simulation = Simulation(
        {"some": Guess(lambda one: 0.8 if one.startswith("greedy") else 0.0)},
        temperature=lambda one: 0.0 if one.startswith("greedy") else 1.0,
    )
    simulation.run(["greedy", "sampled"], 5.0)
    simulation.budget.forget("greedy")
    simulation.run(["sampled"], 5.0)
    while not simulation.budget._drafters._quiet._num_left:
        simulation.round(["sampled"])
    asked = simulation.num_asked["some", "sampled"]
    simulation.round(["sampled", "greedy-new"])
    assert simulation.num_asked["some", "greedy-new"] == 1
    assert simulation.num_asked["some", "sampled"] <= asked + 1


def test_a_dear_drafter_is_tried_no_more_often_than_its_price_allows() -> None:
    dear = Guess(lambda _request: 0.3, cost=DraftCost(0.05, 0.001, 0.001))
    simulation = Simulation({"dear": dear})
    simulation.run(REQUESTS, 5.0)
    before = simulation.spent["dear"]
    simulation.run(REQUESTS, 40.0)
    assert 0 < simulation.spent["dear"] - before < 0.02 * 40.0


def test_one_that_seems_too_dear_is_tried_still() -> None:
    """It is asked when its account is full: the price may have been measured during a pause."""
    simulation = Simulation({"dear": Guess(lambda _request: 0.3, cost=DraftCost(1.0, 0.0, 0.0))})
    simulation.run(REQUESTS, 60.0)
    assert 1.0 <= simulation.spent["dear"] <= 5.0


def test_a_drafter_that_pays_is_asked_soon_and_nearly_always() -> None:
    simulation = Simulation({"good": Guess(lambda _request: 0.8)})
    assert simulation.run(REQUESTS, 5.0) > 1.5
    asked = sum(simulation.num_asked.values())
    simulation.run(REQUESTS, 5.0)
    asked_later = sum(simulation.num_asked.values()) - asked
    assert asked_later > 0.9 * 5.0 / 0.03 * len(REQUESTS) / 2


def test_of_two_that_say_the_same_the_dearer_one_is_left_out() -> None:
    class Echo(Simulation):
        def _propose(self, requests: Sequence[str], by_drafter: Mapping[str, Sequence[str]]):
            offered, said = super()._propose(requests, by_drafter)
            for one, found in zip(requests, offered, strict=True):
                for index, proposal in enumerate(found):
                    right = np.array(said[one][:3], dtype=np.int32)
                    found[index] = chain_proposal(proposal.source, right)
            return offered, said

    simulation = Echo(
        {
            "dear": Guess(lambda _request: 1.0, cost=DraftCost(0.0002, 0.0004, 0.0)),
            "cheap": Guess(lambda _request: 1.0, cost=DraftCost(0.0001, 0.0001, 0.0)),
        }
    )
    simulation.run(REQUESTS, 8.0)
    asked = simulation.num_asked.copy()
    simulation.run(REQUESTS, 8.0)
    count = {
        name: sum(simulation.num_asked.get((name, one), 0) - asked.get((name, one), 0)
                  for one in REQUESTS)
        for name in simulation.guesses
    }  # fmt: skip
    assert count["dear"] < 0.1 * count["cheap"]


def test_each_request_has_the_drafters_that_pay_for_it() -> None:
    cost = DraftCost(0.0, 0.001, 0.0)
    simulation = Simulation({"some": Guess(lambda one: 0.8 * (one == "good"), cost=cost)})
    simulation.run(["good", "bad"], 10.0)
    asked = simulation.num_asked.copy()
    simulation.run(["good", "bad"], 20.0)
    good, bad = (simulation.num_asked["some", one] - asked["some", one] for one in ("good", "bad"))
    assert bad < 0.3 * good
    assert bad * cost.query_s < 0.02 * 20.0


def test_new_requests_begin_with_what_is_known_of_their_class() -> None:
    """Sampled requests gain nothing, greedy ones do: the first steps of new ones know it."""
    cost = DraftCost(0.0, 0.002, 0.0)
    simulation = Simulation(
        {"some": Guess(lambda one: 0.8 if one.startswith("greedy") else 0.0, cost=cost)},
        temperature=lambda one: 0.0 if one.startswith("greedy") else 1.0,
    )
    for index in range(20):
        simulation.run([f"greedy{index}", f"sampled{index}"], 0.5)
        for kind in ("greedy", "sampled"):
            simulation.budget.forget(f"{kind}{index}")
    for _ in range(5):
        simulation.round(["greedy-new", "sampled-new"])
    assert simulation.num_asked["some", "greedy-new"] == 5
    assert simulation.num_asked.get(("some", "sampled-new"), 0) <= 1
    wishes = [
        DraftWish(f"{kind}-newer", warmth, "shared", None, 100, 100)
        for kind, warmth in (("greedy", 0.0), ("sampled", 1.0))
    ]
    costs = {"some": simulation.guesses["some"].cost}
    assert simulation.budget.expected(wishes[0], costs, 2) == {"some"}
    assert simulation.budget.expected(wishes[1], costs, 2) == frozenset()


def test_what_is_known_holds_where_rows_have_another_price() -> None:
    """One request alone has learned; of three at once a row is dearer, in tokens."""
    simulation = Simulation({"some": Guess(lambda _one: 0.8)})
    simulation.run(REQUESTS[:1], 10.0)
    # No account pays for trying it.
    simulation.budget._drafters._known.balance[:] = -1.0
    simulation.round(REQUESTS[1:4])
    assert all(simulation.num_asked.get(("some", one)) for one in REQUESTS[1:4])


def test_a_drafter_comes_back_when_texts_change() -> None:
    now: list[Simulation] = []
    simulation = Simulation({"late": Guess(lambda _one: 0.9 if now[0].now > 8.0 else 0.0)})
    now.append(simulation)
    assert simulation.run(REQUESTS, 8.0) > 0.97
    simulation.run(REQUESTS, 3.0)
    assert simulation.run(REQUESTS, 3.0) > 1.5


def test_probes_that_do_not_pay_are_dropped_and_their_drafters_nodes_stay() -> None:
    simulation = Simulation({"prober": Guess(lambda _request: 0.7, probes=True)})
    assert simulation.run(REQUESTS, 5.0) > 1.2
    probed, asked = simulation.num_probes, sum(simulation.num_asked.values())
    plain = Simulation({"prober": Guess(lambda _request: 0.7)})
    plain.run(REQUESTS, 5.0)
    rate, plain_rate = simulation.run(REQUESTS, 20.0), plain.run(REQUESTS, 20.0)
    assert rate > 0.97 * plain_rate
    rounds_asked = (sum(simulation.num_asked.values()) - asked) / len(REQUESTS)
    assert 0 < simulation.num_probes - probed < 0.2 * rounds_asked


def test_one_that_is_not_adaptive_asks_everyone_for_all_that_they_take() -> None:
    budget = NodeBudget(StepCost(*CURVE), is_adaptive=False)
    wishes = [
        DraftWish("a", 0.0, "shared", None, 10, 10),
        DraftWish("b", 0.0, "shared", ("second",), 10, 10),
    ]
    plan = budget.plan(wishes, {"first": DraftCost(), "second": DraftCost()}, 0)
    assert plan.by_drafter == {"first": ("a",), "second": ("a", "b")}
    assert plan.probing == {"first": {"a"}, "second": {"a", "b"}}


def test_requests_that_end_leave_nothing_behind() -> None:
    simulation = Simulation({"some": Guess(lambda _request: 0.5)})
    for index in range(300):
        simulation.round([f"r{index}", f"r{index + 1}"])
        simulation.budget.forget(f"r{index}")
    assert len(simulation.budget._drafters._known.paths) <= 64


class Loops(Simulation):
    """Answers of 128 tokens, of which two in three loop after 40; a drafter is right in loops and
    wrong now and then before. Steps without drafts decode several tokens.

    Single steps take 1 ms more than a pass, and as much again behind a step of several tokens,
    since these are sent on first.
    """

    last_passes = 1
    host_s = 0.0004

    def __init__(self) -> None:
        guess = Guess(lambda one: float(self.is_loop(one)), length=16)
        super().__init__(
            {"suffix": guess}, multi_step=MultiStep(0.02), curve=([1, 101], [0.0005, 0.0055])
        )

    def is_loop(self, answer: str) -> bool:
        return int(answer) % 3 > 0 and self.decoded.get(answer, 0) > 40

    def round(self, requests: Sequence[str]) -> None:
        num_plans = self.num_plans
        self.budget.note_host(self.host_s)
        super().round(requests)
        if self.num_plans > num_plans:
            self.now += self.host_s

    def _propose(self, requests: Sequence[str], by_drafter: Mapping[str, Sequence[str]]):
        proposing = {
            name: [one for one in ids if self.is_loop(one) or self.rng.random() < 0.3]
            for name, ids in by_drafter.items()
        }
        return super()._propose(requests, proposing)

    def pass_s(self, num_requests: int, num_rows: int, num_passes: int) -> float:
        before, self.last_passes = self.last_passes, num_passes
        if num_passes > 1:
            return 0.001 + 0.0005 * num_passes
        late_s = 0.001 if before > 1 else 0.0
        return 0.0015 + late_s + 0.00005 * (num_rows - num_requests)

    def answers(self, count: int) -> float:
        """Tokens a second of so many answers, one after the other."""
        start, before = self.now, self.num_tokens
        for _ in range(count):
            name = str(len(self.decoded))
            while self.decoded.get(name, 0) < 128:
                self.round([name])
            self.budget.forget(name)
        return (self.num_tokens - before) / (self.now - start)


def test_loops_are_found_where_plain_steps_decode_several_tokens() -> None:
    simulation = Loops()
    simulation.answers(100)
    # Two steps of 32 tokens, and four trees; or four steps.
    best = 3 * 132 / (2 * (2 * 0.017 + 0.0033 + 3 * 0.0023) + 4 * 0.017)
    assert simulation.answers(200) > 0.84 * best
