"""Rounds of an engine with drafters, on a clock that only costs move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from draftline.core.proposals import DraftCost, Proposal, chain_proposal
from draftline.core.speculation.draft_plan import DraftBatch, DraftPlan, PlannedRequest, StepOutcome
from draftline.core.speculation.multi_step import MultiStep
from draftline.core.speculation.policy import SpeculationPolicy
from draftline.core.speculation.step_cost import StepCost
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
        self.policy = SpeculationPolicy(StepCost(*self.curve), multi_step=self.multi_step)
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
        # In the last step.
        self.num_accepted: dict[str, int] = {}

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
            PlannedRequest(one, self.temperature(one), None, 100 + self.decoded.get(one, 0),
                      self.tokens_left, self.num_accepted.get(one, 0))
            for one in requests
        ]  # fmt: skip
        began_at = self.now
        plan = DraftPlan({})
        if not self.policy.is_backed_off(requests):
            plan = self.policy.plan(wishes, costs, 0)
            self.num_plans += 1
        offered, accepted = self._propose(requests, plan.by_drafter)
        draft_s = self._ask(plan.by_drafter)
        self.now += draft_s
        trees = merge_all(offered, [16] * len(requests), [16] * len(requests), self.policy.table)
        probes = [
            {name: PROBE_ROWS for name, ids in plan.probing.items()
             if one in ids and self.guesses[name].probes}
            for one in requests
        ]  # fmt: skip
        num_probe_rows = sum(sum(sent.values()) for sent in probes)
        self.num_probes += bool(num_probe_rows)
        kept = self.policy.select(
            trees,
            [16] * len(requests),
            num_probe_rows,
            ids=requests,
            spent_s=draft_s,
        )
        num_rows = len(requests) + sum(map(len, kept)) + num_probe_rows
        num_passes = 1
        if num_rows == len(requests):
            num_passes = self.policy.num_decode_steps(len(requests), 32, drafters_asked=True)
        seconds = self.pass_s(len(requests), num_rows, num_passes)
        self._charge(kept, probes)
        batch = DraftBatch({}, began_at, draft_s, plan, costs)
        outcome = StepOutcome(num_rows, seconds, 0, batch, num_passes)
        paths = []
        for name in plan.by_drafter:
            if self.guesses[name].probes:
                self.policy.note_probe(name, PROBE_ROWS)
        for one, tree in zip(requests, kept, strict=True):
            tree.check()
            rows = _walk(tree.tokens.tolist(), tree.parents.tolist(), accepted[one])
            self.num_accepted[one] = len(rows) - 1
            rows += [0] * (num_passes - 1)
            self.decoded[one] = self.decoded.get(one, 0) + len(rows)
            paths.append(
                [(row, token, -1) for row, token in zip(rows, accepted[one], strict=False)]
            )
            del self.futures[one][: len(rows)]
        outcome.count(requests, kept, trees, Paths.of(paths))
        self.now += seconds
        self.num_tokens += outcome.num_tokens
        self.policy.update(outcome, self.now)

    def pass_s(self, num_requests: int, num_rows: int, num_passes: int) -> float:
        return float(num_passes * StepCost(*self.curve).seconds(num_requests, num_rows))

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


class Echo(Simulation):
    """All drafters are right as far as they look ahead, so that they say the same."""

    def _propose(self, requests: Sequence[str], by_drafter: Mapping[str, Sequence[str]]):
        offered, said = super()._propose(requests, by_drafter)
        for one, found in zip(requests, offered, strict=True):
            for index, proposal in enumerate(found):
                count = self.num_known(proposal.source, one)
                right = np.array(said[one][:count], dtype=np.int32)
                found[index] = chain_proposal(proposal.source, right)
        return offered, said

    def num_known(self, drafter: str, _request: str) -> int:
        """Tokens that a drafter says of a request."""
        return self.guesses[drafter].length

    def asked_later(self, requests: Sequence[str], seconds: float) -> dict[str, int]:
        """How often each drafter is asked, once they have been known for so many seconds."""
        self.run(requests, seconds)
        asked = self.num_asked.copy()
        self.run(requests, seconds)
        return {
            name: sum(self.num_asked.get((name, one), 0) - asked.get((name, one), 0)
                      for one in requests)
            for name in self.guesses
        }  # fmt: skip


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
        self.policy.note_host(self.host_s)
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
            self.policy.forget(name)
        return (self.num_tokens - before) / (self.now - start)
