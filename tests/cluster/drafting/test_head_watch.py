"""A head whose first drafts are never right is reported once, and left out; others are not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.drafting.head_watch import (
    MOST_QUERIES,
    NUM_DRAFTS,
    HeadWatch,
    head_origins,
)
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.local_drafter import LocalDrafter, StageDrafts
from draftline.core.proposals import (
    Drafted,
    FeatureLayers,
    FeatureRows,
    Proposal,
    Query,
    StepCommit,
    chain_proposal,
    empty_proposal,
)
from draftline.core.tree.proposal_batch import num_right
from support.fakes.fake_drafters import CountingDrafter
from support.servers.hub_session import LIMITS, HubSession

# No text here goes on so.
WRONG = chain_proposal("head", np.full(2, 49, dtype=np.int32))
ORIGINS = {"head": "see HEAD and MODEL"}


class CountingHead(CountingDrafter):
    """A head that is right about every `period`-th text length, and otherwise never."""

    def __init__(self, name: str, period: int) -> None:
        super().__init__(name)
        self.period = period
        self.feature_layers = FeatureLayers((0,), 2)
        self.features: list[FeatureRows] = []

    def observe_features(self, rows: Sequence[FeatureRows]) -> None:
        self.features += rows

    def propose_one(self, query: Query) -> Proposal:
        proposal = super().propose_one(query)
        if query.committed_len % self.period == 0:
            return proposal
        return chain_proposal(self.name, (proposal.tokens + 7) % 50)


async def run(hub: DrafterHub, num_steps: int) -> HubSession:
    await hub.start()
    session = HubSession(hub)
    for _ in range(num_steps):
        await session.step(1)
        hub.note_features([FeatureRows("r", 0, np.zeros((1, 2), dtype=np.float32))])
    return session


async def test_a_head_that_is_never_right_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    strange, other = CountingHead("head", 10**9), CountingDrafter("other")
    hub = DrafterHub([LocalDrafter(strange), LocalDrafter(other)], LIMITS, origins=ORIGINS)
    with caplog.at_level(logging.WARNING):
        session = await run(hub, NUM_DRAFTS)
        assert not caplog.records, "two hundred were asked for, of which one is not judged yet"
        assert hub.feature_drafters == {"head"}
        assert not hub.remote
        session_features = len(strange.features)
        assert session_features > NUM_DRAFTS - 5
        proposals = await session.step(1)
    assert [one.source for one in proposals] == ["other"]
    [record] = caplog.records
    assert "drafter=head" in record.getMessage()
    assert "drafts=200 right=0 see HEAD and MODEL" in record.getMessage()
    assert hub.feature_drafters == frozenset()
    assert hub.costs().keys() == {"other"}
    assert [(one.name, one.left_out, one.connected) for one in hub.stats()] == [
        ("head", True, False),
        ("other", False, True),
    ]
    # It has forgotten all, and hears nothing more.
    assert not strange.texts
    num_messages = hub.stats()[0].messages
    hub.note_features([FeatureRows("r", 0, np.zeros((1, 2), dtype=np.float32))])
    for _ in range(5):
        assert len(await session.step(2)) == 1
    hub.close("r")
    again = HubSession(hub, "s")
    assert [one.source for one in await again.step(1)] == ["other"]
    assert hub.stats()[0].messages == num_messages
    assert len(strange.features) == session_features
    assert len(caplog.records) == 1
    await hub.stop()


@pytest.mark.parametrize(("period", "num_drafts"), [(1, 4), (2, 7), (5, 20), (12, 79)])
async def test_a_head_is_new_until_enough_drafts_were_right(period: int, num_drafts: int) -> None:
    """Three more than one in twenty. The first text is of six tokens."""
    hub = DrafterHub(
        [LocalDrafter(CountingHead("head", period)), LocalDrafter(CountingDrafter())], LIMITS
    )
    session = await run(hub, num_drafts)
    assert {name: cost.is_new for name, cost in hub.costs().items()} == {
        "head": True,
        "counting": False,
    }
    # The last of these drafts is judged when the next one is asked for.
    await session.step(1)
    assert not hub.costs()["head"].is_new


async def test_a_head_that_says_nothing_is_not_asked_for_ever() -> None:
    class Silent(CountingHead):
        def propose_one(self, query: Query) -> Proposal:
            del query
            return empty_proposal(self.name)

    hub = DrafterHub([LocalDrafter(Silent("head", 1))], LIMITS)
    await run(hub, MOST_QUERIES - 1)
    assert hub.costs()["head"].is_new
    await run(hub, 1)
    assert not hub.costs()["head"].is_new
    assert not hub.stats()[0].left_out


@pytest.mark.parametrize(("period", "is_kept"), [(1, True), (18, True), (23, False)])
async def test_about_one_in_twenty_decides(
    period: int, *, is_kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hub = DrafterHub([LocalDrafter(CountingHead("head", period))], LIMITS)
    await run(hub, NUM_DRAFTS + 1)
    assert hub.stats()[0].left_out is not is_kept
    assert len(caplog.records) == (not is_kept)


async def test_other_drafters_may_have_nothing_to_say() -> None:
    class Wrong(CountingDrafter):
        def propose_one(self, query: Query) -> Proposal:
            proposal = super().propose_one(query)
            return chain_proposal(self.name, (proposal.tokens + 7) % 50)

    hub = DrafterHub([LocalDrafter(Wrong("ngram"))], LIMITS)
    await run(hub, NUM_DRAFTS + 20)
    assert not hub.stats()[0].left_out
    assert hub.costs().keys() == {"ngram"}


def commit(base_len: int, *tokens: int) -> StepCommit:
    return StepCommit("r", base_len, np.array(tokens, dtype=np.int32))


def test_only_tokens_right_behind_a_draft_judge_it() -> None:
    """A draft that was replaced, or that came for another length, counts for nothing."""
    watch = HeadWatch(["head"], {})
    draft = chain_proposal("head", np.array([4, 5], dtype=np.int32))
    for _ in range(NUM_DRAFTS):
        watch.given(Query("r", 9, 4), [draft])
        watch.given(Query("r", 10, 4), [draft])
        assert watch.committed([commit(9, 8)]) == []
    watch.given(Query("r", 10, 4), [draft])
    watch.forget("r")
    assert watch.committed([commit(10, 8)]) == []
    assert not watch.is_over
    for _ in range(NUM_DRAFTS):
        watch.given(Query("r", 10, 4), [draft, chain_proposal("other", draft.tokens)])
        assert watch.committed([commit(10, 4, 6)]) == []
    assert watch.is_over


@pytest.mark.parametrize(
    ("tokens", "expected"), [([9], 0), ([3], 1), ([3, 5, 7], 3), ([3, 5, 8], 2), ([4, 5], 1)]
)
def test_right_tokens_are_a_path_from_the_root(tokens: list[int], expected: int) -> None:
    parents = np.array([-1, -1, 0, 2], dtype=np.int32)
    ids = np.array([3, 4, 5, 7], dtype=np.int32)
    draft = Proposal("head", ids, parents, np.zeros(4, dtype=np.float32))
    assert num_right(draft, np.array(tokens, dtype=np.int32)) == expected


def test_the_warning_names_folder_and_model(tmp_path: Path) -> None:
    drafters = (
        DrafterConfig(kind="suffix"),
        DrafterConfig(kind="head", name="mine", model=str(tmp_path)),
    )
    origins = head_origins(EngineConfig(model="demo", drafters=drafters))
    assert origins.keys() == {"mine"}
    assert f"the head in {tmp_path} was trained for demo" in origins["mine"]
    assert f"doctor --drafter {tmp_path} --model demo" in origins["mine"]


async def test_drafts_of_a_head_that_is_left_out_are_let_go() -> None:
    """Those that the last stage made for requests that go on."""
    drafts = StageDrafts("head")
    hub = DrafterHub([LocalDrafter(drafts)], LIMITS, origins=ORIGINS)
    await hub.start()
    session = HubSession(hub)
    while not hub.stats()[0].left_out:
        # Behind the token that the next step commits.
        hub.note_drafted([Drafted("head", 0.0, (("r", len(session.text) + 1, WRONG),))])
        await session.step(1)
    assert not drafts.memory_bytes
    hub.note_drafted([Drafted("head", 0.0, (("r", 1, WRONG),))])
    assert not drafts.memory_bytes
