"""Requests that take drafts, and the plan that asks every drafter for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...arrays import Float64
from ...proposals import DraftCost
from ...reach import EVERY_REACH, NUM_REACHES
from ...speculation.draft_plan import AskPlan

# In rounds nothing is on its way behind any.
EVERY_ANSWER = np.ones(NUM_REACHES)


class DraftWish(NamedTuple):
    """A request that takes drafts.

    drafters     that it takes; None: all
    num_tokens   of its text
    tokens_left  that its answer may still have
    num_accepted  nodes that were accepted in its last step
    miss_shares   float64 [reaches]  of its answers of each reach, those behind which nothing of it
                  is on its way, above 0: only there drafts of the step's end are of use;
                  trials are charged for the others
    is_undrafted  whatever heads were told, they did not draft where the text has come to
    """

    request_id: str
    temperature: float
    namespace: str
    drafters: tuple[str, ...] | None
    num_tokens: int
    tokens_left: int
    num_accepted: int = 0
    miss_shares: Float64 = EVERY_ANSWER
    is_undrafted: bool = False


def everyone(wishes: Sequence[DraftWish], costs: Mapping[str, DraftCost]) -> AskPlan:
    """Every drafter that they take is asked for all requests, and may probe for them."""
    by_drafter: dict[str, tuple[str, ...]] = {}
    for name in costs:
        takers = [wish for wish in wishes if wish.drafters is None or name in wish.drafters]
        if takers:
            by_drafter[name] = tuple(wish.request_id for wish in takers)
    probing = {name: frozenset(ids) for name, ids in by_drafter.items()}
    ahead = {
        name: dict.fromkeys(ids, EVERY_REACH)
        for name, ids in by_drafter.items()
        if costs[name].is_ahead
    }
    return AskPlan(by_drafter, probing, ahead=ahead)
