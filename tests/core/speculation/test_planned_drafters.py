"""Engines on a clock that costs move: drafters are asked where they pay, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from draftline.core.proposals import DraftCost, chain_proposal
from draftline.core.speculation.draft_plan import DraftBatch, DraftPlan, PlannedRequest, StepOutcome
from draftline.core.speculation.policy import EXPLORED_SHARE, SpeculationPolicy
from draftline.core.speculation.step_cost import StepCost
from draftline.core.tree.merge import merge
from draftline.core.tree.tree import TreeBatch
from draftline.core.verify.walk import Paths
from support.fakes.policy_simulation import CURVE, Echo, Guess, Loops, Simulation

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
    simulation.run(REQUESTS, 5.0)
    before = simulation.spent["useless"]
    simulation.run(REQUESTS, 20.0)
    assert 0 < simulation.spent["useless"] - before < 1.25 * EXPLORED_SHARE * 20.0


class LongerSteps(Simulation):
    """A step that asks takes 5 ms that no drafter tells of."""

    untold_s = 0.0

    def _ask(self, by_drafter: Mapping[str, Sequence[str]]) -> float:
        if by_drafter:
            self.now += 0.005
            self.untold_s += 0.005
        return super()._ask(by_drafter)


def test_drafters_that_are_tried_pay_for_what_steps_take_longer() -> None:
    simulation = LongerSteps({"useless": Guess(lambda _request: 0.0)})
    simulation.run(REQUESTS[:1], 5.0)
    before = simulation.untold_s
    simulation.run(REQUESTS[:1], 20.0)
    assert 0 < simulation.untold_s - before < 1.25 * EXPLORED_SHARE * 20.0


def test_where_nobody_pays_most_steps_go_without_a_plan() -> None:
    """Also where requests come and go, and where they take turns."""
    cost = DraftCost(0.001, 0.001, 0.0)
    simulation = Simulation({"useless": Guess(lambda _request: 0.0, cost=cost)})
    for index in range(200):
        requests = [f"r{index}", f"r{index + 1}"]
        wish = PlannedRequest(requests[1], 0.0, None, 100, 100)
        simulation.policy.expected(wish, {"useless": cost}, 2)
        for group in requests:
            simulation.round([group])
            simulation.round([group])
        simulation.policy.forget(requests[0])
    assert 0 < simulation.num_plans < 0.3 * 800
    assert len(simulation.policy._backed_off) <= 2


def test_a_new_request_of_which_something_is_expected_is_planned_at_once() -> None:
    simulation = Simulation(
        {"some": Guess(lambda one: 0.8 if one.startswith("greedy") else 0.0)},
        temperature=lambda one: 0.0 if one.startswith("greedy") else 1.0,
    )
    simulation.run(["greedy", "sampled"], 5.0)
    simulation.policy.forget("greedy")
    simulation.run(["sampled"], 5.0)
    while not simulation.policy._backoff_left:
        simulation.round(["sampled"])
    asked = simulation.num_asked["some", "sampled"]
    simulation.round(["sampled", "greedy-new"])
    assert simulation.num_asked["some", "greedy-new"] == 1
    assert simulation.num_asked["some", "sampled"] <= asked + 1


def test_a_dear_drafter_is_tried_no_more_often_than_its_price_allows() -> None:
    dear = Guess(lambda _request: 0.3, cost=DraftCost(0.05, 0.001, 0.001))
    simulation = Simulation({"dear": dear})
    simulation.run(REQUESTS[:2], 5.0)
    before = simulation.spent["dear"]
    simulation.run(REQUESTS[:2], 120.0)
    assert 0 < simulation.spent["dear"] - before < 0.01 * 120.0


def test_the_less_a_drafter_may_bring_the_rarer_it_is_tried() -> None:
    spent = {}
    for cost in (0.0001, 0.02):
        guess = Guess(lambda _request: 0.1, cost=DraftCost(0.0, cost, 0.0))
        simulation = Simulation({"some": guess})
        simulation.run(REQUESTS[:1], 10.0)
        before = simulation.spent["some"]
        simulation.run(REQUESTS[:1], 20.0)
        spent[cost] = (simulation.spent["some"] - before) / 20.0
    assert 0 < spent[0.02] < 0.9 * spent[0.0001]
    assert spent[0.0001] > 0.8 * EXPLORED_SHARE


class Large(Simulation):
    """A target of 6.4 ms a pass, as an 8B on one H100, which has rows for nearly nothing."""

    def __init__(self, cost_s: float, rate: float, seed: int) -> None:
        guess = Guess(lambda _request: rate, length=6, cost=DraftCost(0.0, cost_s, 0.0))
        super().__init__({"some": guess}, curve=([1, 101], [0.0064, 0.0074]), seed=seed)

    def speed(self) -> float:
        """Of eight further answers of 64 tokens, over plain decoding's."""
        began_at, before = self.now, self.num_tokens
        for _ in range(8):
            name = str(len(self.decoded))
            while self.decoded.get(name, 0) < 64:
                self.round([name])
            self.policy.forget(name)
        return (self.num_tokens - before) * self.curve[1][0] / (self.now - began_at)


@pytest.mark.parametrize("seed", range(3))
def test_at_the_times_of_a_large_target_what_never_pays_takes_one_percent(seed: int) -> None:
    useless = Large(0.0098, 0.0, seed)
    assert useless.speed() > 0.98
    assert useless.speed() > 0.99
    assert useless.spent["some"] > 0, "it is tried still"
    good = Large(0.0017, 0.45, seed)
    good.speed()
    assert good.speed() > 1.3


def test_one_that_seems_too_dear_is_tried_still() -> None:
    """It is asked when its account is full: the price may have been measured during a pause."""
    simulation = Simulation({"dear": Guess(lambda _request: 0.3, cost=DraftCost(1.0, 0.0, 0.0))})
    simulation.run(REQUESTS[:2], 60.0)
    assert 1.0 <= simulation.spent["dear"] <= 5.0


def test_a_drafter_that_pays_is_asked_soon_and_nearly_always() -> None:
    simulation = Simulation({"good": Guess(lambda _request: 0.8)})
    assert simulation.run(REQUESTS, 5.0) > 1.5
    asked = sum(simulation.num_asked.values())
    simulation.run(REQUESTS, 5.0)
    asked_later = sum(simulation.num_asked.values()) - asked
    assert asked_later > 0.9 * 5.0 / 0.03 * len(REQUESTS) / 2


def test_of_two_that_say_the_same_the_dearer_one_is_left_out() -> None:
    simulation = Echo(
        {
            "dear": Guess(lambda _one: 1.0, length=3, cost=DraftCost(0.0002, 0.0004, 0.0)),
            "cheap": Guess(lambda _one: 1.0, length=3, cost=DraftCost(0.0001, 0.0001, 0.0)),
        }
    )
    count = simulation.asked_later(REQUESTS, 8.0)
    assert count["dear"] < 0.1 * count["cheap"]


def test_one_that_says_more_takes_the_place_of_a_cheaper_one() -> None:
    """Beside the cheaper one it brings less than it takes, and by itself it is the better one."""
    simulation = Echo(
        {
            "less": Guess(lambda _one: 1.0, length=3, cost=DraftCost(0.0, 0.0017, 0.0)),
            "more": Guess(lambda _one: 1.0, length=4, cost=DraftCost(0.0, 0.0018, 0.0)),
        }
    )
    count = simulation.asked_later(REQUESTS, 8.0)
    assert count["less"] < 0.4 * count["more"]


class Parts(Echo):
    """Cheap drafters that are each right in another third of the steps, and a dear one that is
    right in all of them, `more` tokens further."""

    def __init__(self, more: int, cost_s: float) -> None:
        cheap = {f"part{index}": Guess(lambda _one: 1.0, length=4) for index in range(3)}
        dear = Guess(lambda _one: 1.0, length=4 + more, cost=DraftCost(0.0, cost_s, 0.0))
        super().__init__({**cheap, "dear": dear}, curve=([1, 101], [0.010, 0.011]))

    def _propose(self, requests: Sequence[str], by_drafter: Mapping[str, Sequence[str]]):
        offered, said = super()._propose(requests, by_drafter)
        lucky = f"part{self.rng.integers(3)}"
        for found in offered:
            found[:] = [one for one in found if one.source in {lucky, "dear"}]
        return offered, said


def test_a_dear_one_whose_tokens_several_cheap_ones_say_together_is_left_out() -> None:
    """None of them says them alone, so beside each of them it seems to bring much."""
    simulation = Parts(more=0, cost_s=0.004)
    count = simulation.asked_later(REQUESTS, 8.0)
    assert count["dear"] < 0.1 * min(count[f"part{index}"] for index in range(3))


def test_what_is_drafted_behind_a_new_prompt_is_chosen_together_too() -> None:
    """The dear one pays by itself, and not beside the cheap ones."""
    wish = PlannedRequest("new", 0.0, None, 100, 100)
    simulation = Parts(more=0, cost_s=0.002)
    simulation.asked_later(REQUESTS, 8.0)
    # First steps are known by themselves.
    for index in range(60):
        simulation.round([f"first{index}"])
        simulation.policy.forget(f"first{index}")
    costs = {name: guess.cost for name, guess in simulation.guesses.items()}
    expected = simulation.policy.expected(wish, costs, len(REQUESTS))
    assert expected == {"part0", "part1", "part2"}
    alone = simulation.policy.expected(wish, {"dear": costs["dear"]}, len(REQUESTS))
    assert alone == {"dear"}


def test_a_dear_one_that_says_more_than_several_cheap_ones_together_is_asked() -> None:
    simulation = Parts(more=8, cost_s=0.002)
    count = simulation.asked_later(REQUESTS, 8.0)
    assert count["dear"] > 0.8 * max(count.values())


class Runs(Simulation):
    """Texts that copy in runs of steps: `copies` is right in a run, to its end, and wrong between
    runs; `dear` is always right, and short."""

    def __init__(self) -> None:
        self.is_run = dict.fromkeys(REQUESTS, False)
        self.num_dear = {False: 0, True: 0}
        self.num_steps = {False: 0, True: 0}
        dear = DraftCost(0.0, 0.002, 0.0)
        super().__init__(
            {
                "copies": Guess(lambda one: float(self.is_run[one]), length=10),
                "dear": Guess(lambda _one: 1.0, length=3, cost=dear),
            },
            curve=([1, 101], [0.010, 0.011]),
        )

    def _propose(self, requests: Sequence[str], by_drafter: Mapping[str, Sequence[str]]):
        for one in requests:
            was_run = self.num_accepted.get(one, 0) > 3
            self.num_steps[was_run] += 1
            self.num_dear[was_run] += one in by_drafter.get("dear", ())
            if self.rng.random() < 0.1:
                self.is_run[one] = not self.is_run[one]
        return super()._propose(requests, by_drafter)


def test_a_dear_one_is_asked_where_the_last_step_tells_that_others_fail() -> None:
    simulation = Runs()
    simulation.run(REQUESTS[:1], 20.0)
    simulation.num_dear, simulation.num_steps = {False: 0, True: 0}, {False: 0, True: 0}
    simulation.run(REQUESTS[:1], 20.0)
    share = {key: simulation.num_dear[key] / simulation.num_steps[key] for key in (False, True)}
    assert share[False] > 0.8
    assert share[True] < 0.2


def test_in_its_first_steps_an_engine_asks_everyone_together() -> None:
    """What takes longer than a round of plain decoding waits until its account allows it, and what
    hardly ever will pay is not asked for long.
    """
    cheap, dear = DraftCost(0.0, 0.008, 0.0), DraftCost(0.0, 0.02, 0.0)
    simulation = Simulation(
        {
            "first": Guess(lambda _one: 0.0, cost=cheap),
            "second": Guess(lambda _one: 0.6, cost=cheap),
            "dear": Guess(lambda _one: 0.0, cost=dear),
        }
    )

    def asked_in(rounds: int) -> list[int]:
        before = simulation.num_asked.copy()
        for _ in range(rounds):
            simulation.round(REQUESTS[:1])
        keys = [(name, "r0") for name in simulation.guesses]
        return [simulation.num_asked.get(key, 0) - before.get(key, 0) for key in keys]

    assert asked_in(14) == [14, 14, 0]
    first, second, dear = asked_in(86)
    assert first < 43
    assert second >= 80
    assert dear < 6
    assert asked_in(100)[0] < 6


def test_one_that_never_pays_is_asked_for_long_by_the_engine_once_not_by_each_request() -> None:
    cost = DraftCost(0.001, 0.002, 0.0)
    simulation = Simulation({"never": Guess(lambda _one: 0.0, cost=cost)})
    asked = []
    for index in range(40):
        while simulation.decoded.get(f"r{index}", 0) < 120:
            simulation.round([f"r{index}"])
        simulation.policy.forget(f"r{index}")
        asked.append(simulation.num_asked.get(("never", f"r{index}"), 0))
    # Twelve tokens of 10 ms are 40 times the 3 ms that it takes; some more are explored.
    assert 40 <= asked[0] <= 50
    # Then it is tried, for its share of the time.
    assert 0 < sum(asked[1:]) * 0.003 <= EXPLORED_SHARE * 39 * 120 * 0.010


@pytest.mark.parametrize("seed", range(3))
def test_one_that_finds_the_beginning_of_a_copy_is_asked_before_it_begins(seed: int) -> None:
    """Of 80 tokens 40 are copied. Where the last step accepted nothing, a step that asks costs
    three tenths of a token and saves one in twenty, but the copy behind it pays for all."""
    simulation: Simulation

    def rate(one: str) -> float:
        return 1.0 if simulation.decoded.get(one, 0) % 80 >= 40 else 0.05

    cost = DraftCost(0.0, 0.003, 0.0)
    simulation = Simulation({"some": Guess(rate, length=5, cost=cost)}, seed=seed)
    simulation.run(REQUESTS[:1], 10.0)
    # Asked behind accepted tokens alone, and tried now and then, it is 1.16 times as fast.
    assert simulation.run(REQUESTS[:1], 40.0) > 1.2


def test_each_request_has_the_drafters_that_pay_for_it() -> None:
    cost = DraftCost(0.0, 0.001, 0.0)
    simulation = Simulation({"some": Guess(lambda one: 0.8 * (one == "good"), cost=cost)})
    simulation.run(["good", "bad"], 10.0)
    asked = simulation.num_asked.copy()
    simulation.run(["good", "bad"], 20.0)
    good, bad = (simulation.num_asked["some", one] - asked["some", one] for one in ("good", "bad"))
    assert bad < 0.4 * good
    assert bad * cost.query_s < 0.03 * 20.0


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
            simulation.policy.forget(f"{kind}{index}")
    for _ in range(5):
        simulation.round(["greedy-new", "sampled-new"])
    assert simulation.num_asked["some", "greedy-new"] == 5
    assert simulation.num_asked.get(("some", "sampled-new"), 0) <= 1
    wishes = [
        PlannedRequest(f"{kind}-newer", warmth, None, 100, 100)
        for kind, warmth in (("greedy", 0.0), ("sampled", 1.0))
    ]
    costs = {"some": simulation.guesses["some"].cost}
    assert simulation.policy.expected(wishes[0], costs, 2) == {"some"}
    assert simulation.policy.expected(wishes[1], costs, 2) == frozenset()


def test_what_is_known_holds_where_rows_have_another_price() -> None:
    """One request alone has learned; of three at once a row is dearer, in tokens."""
    simulation = Simulation({"some": Guess(lambda _one: 0.8)})
    simulation.run(REQUESTS[:1], 10.0)
    # No account pays for trying it.
    simulation.policy._credit_s[:] = -1.0
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
    policy = SpeculationPolicy(StepCost(*CURVE), is_adaptive=False)
    wishes = [
        PlannedRequest("a", 0.0, None, 10, 10),
        PlannedRequest("b", 0.0, ("second",), 10, 10),
    ]
    plan = policy.plan(wishes, {"first": DraftCost(), "second": DraftCost()}, 0)
    assert plan.by_drafter == {"first": ("a",), "second": ("a", "b")}
    assert plan.probing == {"first": {"a"}, "second": {"a", "b"}}


def test_requests_that_end_leave_nothing_behind() -> None:
    simulation = Simulation({"some": Guess(lambda _request: 0.5)})
    for index in range(300):
        simulation.round([f"r{index}", f"r{index + 1}"])
        simulation.policy.forget(f"r{index}")
    assert len(simulation.policy._requests) <= 2


def test_loops_are_found_where_plain_steps_decode_several_tokens() -> None:
    simulation = Loops()
    simulation.answers(100)
    # Two steps of 32 tokens, and four trees; or four steps.
    best = 3 * 132 / (2 * (2 * 0.017 + 0.0033 + 3 * 0.0023) + 4 * 0.017)
    assert simulation.answers(200) > 0.84 * best


def test_what_is_new_is_asked_whatever_it_brings_and_what_is_gone_never() -> None:
    """As the hub tells of heads that nothing is known of, and of those that it has left out."""
    new = DraftCost(0.001, 0.001, 0.0, is_new=True)
    simulation = Simulation({"head": Guess(lambda _request: 0.0, cost=new)})
    requests = REQUESTS[:2]
    for _ in range(100):
        simulation.round(requests)
    assert [simulation.num_asked["head", one] for one in requests] == [100, 100]
    wishes = [PlannedRequest(one, 0.0, None, 100, 100) for one in requests]
    others = PlannedRequest("other", 0.0, ("none",), 100, 100)
    policy = simulation.policy
    plan = policy.plan([*wishes, others], {"head": new}, 0)
    assert plan.by_drafter == {"head": requests}, "not for who does not take it"
    assert policy.expected(wishes[0], {"head": new}, 1) == {"head"}
    for _ in range(300):
        assert not policy.plan(wishes, {}, 0).by_drafter
        assert not policy.expected(wishes[0], {}, 1)
    # Known by now, it is an ordinary drafter, which brings nothing.
    simulation.guesses["head"] = Guess(lambda _request: 0.0, cost=DraftCost(0.001, 0.001, 0.0))
    for _ in range(100):
        simulation.round(requests)
    assert simulation.num_asked["head", requests[0]] < 115


def test_what_is_new_is_tried_on_few_requests() -> None:
    """A head has to read the whole text of each."""
    new = DraftCost(0.001, 0.001, 0.0, is_new=True)
    simulation = Simulation({"head": Guess(lambda _request: 0.0, cost=new)})
    wishes = [PlannedRequest(one, 0.0, None, 100, 100) for one in REQUESTS]
    expected = [bool(simulation.policy.expected(wish, {"head": new}, 1)) for wish in wishes]
    assert expected == [True] * 4 + [False] * 4
    for _ in range(10):
        simulation.round(REQUESTS)
    assert [simulation.num_asked.get(("head", one), 0) for one in REQUESTS] == [10] * 4 + [0] * 4
    simulation.policy.forget(REQUESTS[1])
    left = [one for one in REQUESTS if one != REQUESTS[1]]
    simulation.round(left)
    asked = [simulation.num_asked.get(("head", one), 0) for one in left]
    assert asked == [11] * 3 + [1] + [0] * 3


def test_an_engine_without_drafters_expects_and_asks_nobody() -> None:
    policy, wish = SpeculationPolicy(), PlannedRequest("r", 0.0, None, 2, 2)
    assert policy.expected(wish, {}, 1) == frozenset()
    assert not policy.plan([wish], {}, 0).by_drafter


@pytest.mark.parametrize("is_behind", [False, True])
def test_nothing_is_learned_of_slices_that_went_behind_others(is_behind: bool) -> None:
    """All drafts are wrong there, which says nothing of what drafts bring a round."""
    policy = SpeculationPolicy(StepCost([1, 64], [1.0, 1.2]))
    wish, costs = PlannedRequest("a", 0.0, None, 100, 100), {"b": DraftCost(0.2, 0.2)}
    tree = merge([chain_proposal("b", np.arange(1, dtype=np.int32))], 4, 4, policy.table)
    right, wrong = [(0, 0, 0), (1, 9, -1)], [(0, 9, -1)]
    for step, path in enumerate([right] * 20 + [wrong] * 60):
        plan = policy.plan([wish], costs, 0)
        followers = frozenset({"a"} if is_behind and path is wrong else ())
        outcome = StepOutcome(
            5, 1.0, 0, DraftBatch({}, 0.0, 0.0, plan, costs), is_pipelined=True, followers=followers
        )
        outcome.count(["a"], [tree], TreeBatch.of([tree]), Paths.of([path]))
        policy.update(outcome, 1.0 + step)
    plan = policy.plan([wish], costs, 0)
    assert ("a" in plan.by_drafter.get("b", ()) and not plan.explored_s) is is_behind


def test_a_plan_that_asks_nobody_may_have_requests_beside_it() -> None:
    """Those that go on behind steps in flight: their drafters were chosen before."""
    policy = SpeculationPolicy(StepCost([1, 64], [1.0, 1.2]))
    dear = {"b": DraftCost(90.0, 90.0)}
    plan = policy.plan([PlannedRequest("new", 0.0, None, 100, 100)], dear, 0)
    assert not plan.by_drafter
    learn_of(policy, plan.beside({"b": ["old"]}), dear, ["new", "old"])


def test_a_drafter_may_join_while_a_step_is_in_flight() -> None:
    policy = SpeculationPolicy(StepCost([1, 64], [1.0, 1.2]))
    wish, costs = PlannedRequest("a", 0.0, None, 100, 100), dict.fromkeys("bc", DraftCost())
    plan = policy.plan([wish], costs, 0)
    more = {**costs, "d": DraftCost()}
    later = policy.plan([wish], more, 0)
    assert (len(plan.by_drafter), len(later.by_drafter)) == (2, 3)
    learn_of(policy, plan, costs, ["a"])
    learn_of(policy, later, more, ["a"])


def learn_of(
    policy: SpeculationPolicy, plan: DraftPlan, costs: Mapping[str, DraftCost], ids: Sequence[str]
) -> None:
    """A step of which a drafted node was right, and one wrong."""
    tree = merge([chain_proposal("b", np.arange(2, dtype=np.int32))], 4, 4, policy.table)
    trees, paths = [tree] * len(ids), [[(0, 0, 0), (1, 9, -1)]] * len(ids)
    outcome = StepOutcome(5, 1.0, 0, DraftBatch({}, 0.0, 0.0, plan, costs), is_pipelined=True)
    outcome.count(ids, trees, TreeBatch.of(trees), Paths.of(paths))
    policy.update(outcome, 1.0)


def test_a_plan_tells_whom_it_asks_for_a_request() -> None:
    plan = DraftPlan({"a": ("one", "two"), "b": ("one",), "c": ("two",)})
    assert plan.asked("one") == ("a", "b")
    assert plan.asked("two") == ("a", "c")
    more = plan.beside({"a": ["three"], "d": ["three", "four"]})
    assert more.by_drafter == {
        "a": ("one", "two", "three"), "b": ("one",), "c": ("two",), "d": ("three", "four"),
    }  # fmt: skip
    assert plan.beside({}) is plan
