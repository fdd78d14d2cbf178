"""Sequoia's trees of heads have the shape that acceptance and times ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draftline.core.proposals import (
    Commit,
    DraftRequest,
    FeatureRows,
    Proposal,
    Query,
    chain_proposal,
)
from draftline.drafters.heads.drafter import HeadDrafter, load_head_drafter
from draftline.drafters.heads.options import HeadOptions
from draftline.drafters.heads.tree_growth import MOST_DRAFTS, MeasuredShapes
from draftline.drafters.tree_shape import TreeShape, shape_of_sequoia
from draftline.models.load.bundled import demo_path
from draftline.models.load.checkpoint import resolve_head_path
from draftline.models.load.model_info import read_model_info

PROMPT = np.arange(5, 14, dtype=np.int32)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(name: str, max_nodes: int, **options: Any) -> tuple[HeadDrafter, Proposal]:
    """A bundled head, and what it drafts behind a prompt of random states."""
    target = read_model_info(str(demo_path("demo")))
    drafter = load_head_drafter(
        resolve_head_path(name), target, options=HeadOptions(tree="sequoia", **options)
    )
    assert isinstance(drafter, HeadDrafter)
    drafter.open(DraftRequest("r", PROMPT, len(PROMPT), 0.0, 3))
    shape = (len(PROMPT) - 1, len(drafter.feature_layers.layers) * target.hidden_size)
    states = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    drafter.observe_features([FeatureRows("r", 0, states)])
    [proposal] = drafter.propose([Query("r", len(PROMPT), max_nodes)])
    return drafter, proposal


def paths(parents: list[int], ranks: list[int]) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for parent, rank in zip(parents, ranks, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), rank))
    return set(found)


def ranks_of(proposal: Proposal) -> set[tuple[int, ...]]:
    """Paths of ranks, siblings ranked by their log-probabilities."""
    parents, scores = proposal.parents.tolist(), proposal.log_probs.tolist()
    ranks = [
        sum(other == parent and scores[k] > score for k, other in enumerate(parents))
        for parent, score in zip(parents, scores, strict=True)
    ]
    return paths(parents, ranks)


def shape_paths(shape: TreeShape) -> set[tuple[int, ...]]:
    return paths(shape.parents.tolist(), shape.ranks.tolist())


@pytest.mark.parametrize("name", ["demo-griffin", "demo-dflash", "demo-specformer"])
@pytest.mark.parametrize("max_nodes", [3, 9, 14])
def test_a_tree_is_the_best_of_its_size(name: str, max_nodes: int) -> None:
    """Of heads that grow level by level, and of those that draft all levels at once; nodes cost
    nothing before a verification was measured."""
    drafter, proposal = asked(name, max_nodes, num_tokens=4)
    assert drafter._measured is not None
    acceptance = drafter._measured._shapes.acceptance.tolist()
    best, expected = shape_of_sequoia(acceptance, max_nodes, min(4, max_nodes))
    assert len(proposal.tokens) == max_nodes
    assert ranks_of(proposal) == shape_paths(best)
    assert expected > 0
    drafter.close("r")
    assert not drafter.memory_bytes


def test_a_head_learns_from_the_text_behind_its_drafts() -> None:
    """Always right in its second child, it drafts that child's below and no longer a chain."""
    drafter, first = asked("demo-griffin", 6, num_tokens=3)
    length, measured = len(PROMPT), drafter._measured
    assert measured is not None
    assert len({path[:1] for path in ranks_of(first)}) < 5
    before = measured._shapes.acceptance
    for _ in range(400):
        two = Proposal(
            "head", np.array([1, 2], dtype=np.int32), np.full(2, -1, dtype=np.int32),
            np.zeros(2, dtype=np.float32),
        )  # fmt: skip
        measured.finished({"r": (length, two)})
        drafter.observe([Commit("r", length, np.array([2], dtype=np.int32))])
        length += 1
    after = measured._shapes.acceptance
    assert after[1] > 0.8 > before[1]
    assert after[0] < 0.1
    assert len(measured.expansion(3, 6).ranks(-1)) >= 2


@pytest.mark.parametrize("is_one_pass", [False, True])
def test_depth_costs_passes_only_where_levels_take_one_each(*, is_one_pass: bool) -> None:
    """A round takes 1 s, a pass 0.5 s."""
    clock = Clock()
    measured = MeasuredShapes(is_one_pass=is_one_pass, clock=clock)
    shapes = measured._shapes
    shapes._accepted = shapes._judged * np.array([0.6, 0.1, *[0.0] * 6])
    for step in range(60):
        # Whatever the number of nodes.
        draft = chain_proposal("head", np.full(1 + step % 8, 4, dtype=np.int32))
        measured.started(["r"])
        measured.grows()
        for level in range(4):
            # All is said with the first level.
            clock.now += 0.0 if is_one_pass and level else 0.5
            measured.level_done(is_last=level == 3)
        measured.finished({"r": (step, draft)})
        clock.now += 1.0
    assert measured._costs.draw_s == pytest.approx(0.5, abs=0.01)
    found = measured._shapes.shape(16, 5)
    assert (found.depth == 5) is is_one_pass


def test_what_is_between_drafts_of_others_is_no_verification() -> None:
    clock = Clock()
    measured = MeasuredShapes(is_one_pass=True, clock=clock)
    draft = chain_proposal("head", np.array([4], dtype=np.int32))
    measured.finished({"r": (3, draft)})
    clock.now += 100.0
    measured.started(["s"])
    assert not measured._shapes._verify.weight
    measured.started(["s", "r"])
    assert measured._shapes._verify.weight


def test_only_the_text_right_behind_a_draft_judges_it() -> None:
    measured = MeasuredShapes(is_one_pass=True)
    before = measured._shapes.acceptance.tolist()
    draft = chain_proposal("head", np.array([4], dtype=np.int32))
    measured.finished({"r": (3, draft)})
    measured.followed("r", 4, [4])
    measured.followed("r", 3, [4])
    measured.finished({"r": (3, draft)})
    measured.forget("r")
    measured.followed("r", 3, [4])
    assert measured._shapes.acceptance.tolist() == before
    for request in range(MOST_DRAFTS + 1):
        measured.finished({request: (3, draft)})
    measured.followed(0, 3, [4])
    assert measured._shapes.acceptance.tolist() == before, "the oldest was let go"
    measured.followed(1, 3, [4])
    assert measured._shapes.acceptance.tolist() != before
