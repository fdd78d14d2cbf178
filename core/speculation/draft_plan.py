"""Who is asked for drafts in a step, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..proposals import DraftCost, Proposal
from ..steps import EVERY_LENGTH_BUCKET, length_bucket_of
from ..tree.tree import TokenTree, TreeBatch, empty_trees
from ..verify.walk import Paths


class PlannedRequest(NamedTuple):
    """A request that takes drafts.

    drafters       that it takes; None: all
    num_tokens     of its text
    tokens_left    that its answer may still have
    num_accepted   draft tokens that were accepted in its last step
    heads_drafted  whether heads of the last stage had to draft where the text has come to
    """

    request_id: str
    temperature: float
    drafters: tuple[str, ...] | None
    num_tokens: int
    tokens_left: int
    num_accepted: int = 0
    heads_drafted: bool = True

    @property
    def length_bucket(self) -> int:
        """The bucket of its last accepted length."""
        return length_bucket_of(self.num_accepted)


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlan:
    """Who is asked for what in a step.

    by_drafter    ids of the requests that each drafter is asked for; without drafters that are not
                  asked
    probing       of these, the requests whose probes go into the step
    explored_s    seconds that the step is expected to take longer for each explored drafter;
                  empty if any is asked for another reason
    heads         of the last stage's heads, which draft at the end of this step for the next one:
                  by request, after which accepted lengths they do, bits of
                  buckets (`core/steps.py`). In `by_drafter` they are asked for what the plan before
                  ordered
    head_counts   for how many requests each of these is expected to draft; all, if not here
    level_tokens  of those heads: what a further level of their drafts takes, in tokens that would
                  save as much
    step_s        seconds of a step of one token of each request; 0 if it is not known
    token_s       seconds that an accepted token saves
    buckets       of each request that was planned for, what is learned of it belongs to
    """

    by_drafter: Mapping[str, tuple[str, ...]]
    probing: Mapping[str, frozenset[str]] = field(default_factory=dict)
    explored_s: Mapping[str, float] = field(default_factory=dict)
    heads: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    head_counts: Mapping[str, float] = field(default_factory=dict)
    level_tokens: Mapping[str, float] = field(default_factory=dict)
    step_s: float = 0.0
    token_s: float = 0.0
    buckets: Mapping[str, int] = field(default_factory=dict)

    def asked(self, request_id: str) -> tuple[str, ...]:
        """Drafters that are asked for a request."""
        return tuple(name for name, ids in self.by_drafter.items() if request_id in ids)

    def probers(self, request_id: str) -> set[str]:
        """Drafters whose probes for a request go into the step."""
        return {name for name, ids in self.probing.items() if request_id in ids}

    def beside(self, more: Mapping[str, Sequence[str]]) -> DraftPlan:
        """This one, whose drafters are also asked for requests that nothing was decided about."""
        if not more:
            return self
        names = dict.fromkeys((*self.by_drafter, *more))
        by_drafter = {name: (*self.by_drafter.get(name, ()), *more.get(name, ())) for name in names}
        return replace(self, by_drafter=by_drafter)


NOBODY = DraftPlan({})


def ask_everybody(requests: Sequence[PlannedRequest], costs: Mapping[str, DraftCost]) -> DraftPlan:
    """Every drafter that they take is asked for all requests, and may probe for them."""
    by_drafter: dict[str, tuple[str, ...]] = {}
    for name in costs:
        takers = [
            request for request in requests if request.drafters is None or name in request.drafters
        ]
        if takers:
            by_drafter[name] = tuple(request.request_id for request in takers)
    heads = {
        name: dict.fromkeys(ids, EVERY_LENGTH_BUCKET)
        for name, ids in by_drafter.items()
        if costs[name].is_ahead
    }
    probing = {name: frozenset(ids) for name, ids in by_drafter.items()}
    return DraftPlan(by_drafter, probing, heads=heads)


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """What drafters proposed, by request id.

    began_at  when the planning of the step began, seconds of the engine's clock
    seconds   how long they were waited for
    plan      who was asked for what
    costs     of each drafter, by name
    skipped   drafters that were not asked in the end, whatever the plan says
    """

    by_request: Mapping[str, Sequence[Proposal]]
    began_at: float
    seconds: float
    plan: DraftPlan
    costs: Mapping[str, DraftCost]
    skipped: frozenset[str] = frozenset()

    @property
    def ahead_s(self) -> float:
        """Seconds that the step will last longer for what heads draft at its end."""
        # One of them may have been left out since the plan.
        heads = [
            (self.costs.get(name), self.plan.head_counts.get(name, len(ids)))
            for name, ids in self.plan.heads.items()
        ]
        return sum(
            min(count, 1.0) * cost.message_s + count * cost.query_s
            for cost, count in heads
            if cost is not None
        )


def nobody_asked(began_at: float) -> DraftBatch:
    """The batch of a step that was planned then, without drafts."""
    return DraftBatch({}, began_at, 0.0, NOBODY, {})


@dataclass(slots=True)
class StepOutcome:
    """What a step took and brought; counted while it is committed.

    seconds          of its pass
    num_prompt_rows  of its rows
    num_passes       tokens of each request, where no drafts were verified
    ahead_s          of its seconds, that went into drafts for the next step
    is_pipelined      whether it held chunks of pipelined trees: its seconds are no step's
    followers        ids of requests whose chunks went behind others
    """

    num_rows: int
    seconds: float
    num_prompt_rows: int
    draft_batch: DraftBatch
    num_passes: int = 1
    ahead_s: float = 0.0
    is_pipelined: bool = False
    followers: frozenset[str] = frozenset()
    num_tokens: int = 0
    ids: Sequence[str] = ()
    trees: Sequence[TokenTree] = ()
    paths: Paths = field(default_factory=lambda: Paths.of(()))
    step_paths: Paths = field(default_factory=lambda: Paths.of(()))
    drafted: TreeBatch = field(default_factory=lambda: empty_trees(0))

    def count(
        self,
        ids: Sequence[str],
        trees: Sequence[TokenTree],
        drafted: TreeBatch,
        paths: Paths,
        step_paths: Paths | None = None,
    ) -> None:
        """Count what the requests committed; nothing of one that ended meanwhile.

        drafted   the trees before they were cut
        paths     through these
        step_paths  the same by the rows of `trees`; None: as `paths` has them
        """
        self.num_tokens = len(paths.tokens)
        self.step_paths = paths if step_paths is None else step_paths
        self.ids, self.trees, self.drafted, self.paths = ids, trees, drafted, paths
