"""What is wanted of a GPU, and whether the figures reach it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .findings import Findings
from .measure import attention as measure_attention
from .measure import sampling as measure_sampling
from .plan import Plan

# Times the floor, times the one-token step, share of the floor's rate, seconds, share of a step.
MOST_TO_FLOOR = 1.20
MOST_TREE_TO_TOKEN = 1.30
LEAST_ATTENTION_SHARE = 0.70
MOST_SAMPLING_S = 200e-6
MOST_IDLE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal; `found` is None where it was not measured."""

    what: str
    wanted: str
    found: str | None
    is_reached: bool

    @property
    def verification_result(self) -> str:
        """For people."""
        if self.found is None:
            return "not measured"
        return "reached" if self.is_reached else "NOT reached"

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def goals(plan: Plan, findings: Findings) -> list[Goal]:
    """All of them, in the order of the table."""
    return [
        *_step_goals(plan, findings),
        *_kernel_goals(plan, findings),
        _idle_goal(plan, findings),
    ]


def _step_goals(plan: Plan, findings: Findings) -> Iterator[Goal]:
    token = findings.find(plan.whole.name, plan.one_token.name)
    tree = findings.find(plan.whole.name, plan.tree.name)
    to_floor = token.to_floor if token else None
    yield _most(f"{plan.whole.name}, {plan.one_token.name}", to_floor, MOST_TO_FLOOR, "x floor")
    ratio = tree.seconds / token.seconds if tree and token else None
    what = f"the same with {plan.tree.nodes} nodes"
    yield _most(what, ratio, MOST_TREE_TO_TOKEN, "x one token")


def _kernel_goals(plan: Plan, findings: Findings) -> Iterator[Goal]:
    case = plan.attention_goal
    attention = findings.find(measure_attention.GROUP, case.name)
    share = 1 / attention.to_floor if attention else None
    yield Goal(
        f"{measure_attention.GROUP}, {case.name}",
        f"at least {LEAST_ATTENTION_SHARE:.0%} of the floor's rate",
        None if share is None else f"{share:.0%}",
        share is not None and share >= LEAST_ATTENTION_SHARE,
    )
    sampled = [one for one in findings.figures if one.group == measure_sampling.GROUP]
    is_whole = len(sampled) == len(measure_sampling.KINDS)
    slowest = max(sampled, key=lambda one: one.seconds) if is_whole else None
    what = f"sampling {plan.sampling_rows} x {plan.sampling_vocab // 1000}k, slowest kind"
    found = None if slowest is None else 1e6 * slowest.seconds
    yield _most(what, found, 1e6 * MOST_SAMPLING_S, "us", digits=0)


def _idle_goal(plan: Plan, findings: Findings) -> Goal:
    host = findings.facts.get(f"host, {plan.whole.name}", {})
    share = host.get("between_share")
    return Goal(
        "idle device between graphs of one-token steps",
        f"under {MOST_IDLE_SHARE:.0%}",
        None if share is None else f"{share:.1%}",
        share is not None and share < MOST_IDLE_SHARE,
    )


def _most(what: str, found: float | None, most: float, unit: str, digits: int = 2) -> Goal:
    return Goal(
        what,
        f"at most {most:.{digits}f} {unit}",
        None if found is None else f"{found:.{digits}f} {unit}",
        found is not None and found <= most,
    )
