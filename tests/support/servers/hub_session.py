"""A request that lives in a hub: what an engine would do for it, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

import numpy as np
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.replies import DrafterLimits
from draftline.cluster.links.failures import RetryPolicy
from draftline.core.arrays import Int32
from draftline.core.proposals import DraftRequest, Proposal, Query, StepCommit
from support.fakes.fake_drafters import VOCAB_SIZE, following

LIMITS = DrafterLimits(vocab_size=VOCAB_SIZE)
QUICK_RETRY = DrafterLimits(
    vocab_size=VOCAB_SIZE, retry=RetryPolicy(first_delay_s=0.02, max_delay_s=0.1)
)


class HubSession:
    """Commits tokens that count up by one and asks for proposals after them."""

    def __init__(
        self,
        hub: DrafterHub,
        request_id: str = "r",
        prompt_len: int = 5,
        at_once: Collection[str] | None = None,
    ) -> None:
        self.hub = hub
        self.request_id = request_id
        self.text = list(range(prompt_len))
        hub.open(
            DraftRequest(request_id, np.array(self.text, dtype=np.int32), prompt_len, 0.0, seed=1),
            at_once,
        )

    def query(self, max_nodes: int = 8) -> Query:
        return Query(self.request_id, len(self.text), max_nodes)

    def commit(self, count: int, probe_ids: Mapping[str, Int32] | None = None) -> StepCommit:
        """The commit of the next `count` tokens of the text."""
        tokens = following(self.text[-1], count)
        commit = StepCommit(self.request_id, len(self.text), tokens, probe_ids or {})
        self.text.extend(tokens.tolist())
        return commit

    async def step(
        self, count: int = 0, budget_s: float = 5.0, max_nodes: int = 8
    ) -> list[Proposal]:
        """Commit `count` tokens, then the proposals that come back."""
        commits = [self.commit(count)] if count else []
        found = await self.hub.exchange(commits, [self.query(max_nodes)], budget_s=budget_s)
        return found[self.request_id]

    def expected(self, count: int) -> list[int]:
        """What a `CountingDrafter` proposes now."""
        return following(self.text[-1], count).tolist()


class Rhyme:
    """A request whose text repeats, so that prompt lookup always has something to say."""

    def __init__(self, hub: DrafterHub) -> None:
        self.hub = hub
        self.text = [3, 1, 4, 1, 5, 9, 2, 6] * 4
        hub.open(DraftRequest("r", np.array(self.text, dtype=np.int32), len(self.text), 0.0, 1))

    async def step(self) -> int:
        """Commit one token; the number of proposed tokens. They must be the rhyme's own."""
        base = len(self.text)
        self.text.append(self.text[-8])
        commit = StepCommit("r", base, np.array(self.text[base:], dtype=np.int32))
        found = await self.hub.exchange([commit], [Query("r", len(self.text), 4)], budget_s=0.05)
        for proposal in found["r"]:
            expected = [self.text[index - 8] for index in range(base + 1, base + 5)]
            assert proposal.tokens.tolist() == expected[: len(proposal.tokens)]
        return sum(len(proposal.tokens) for proposal in found["r"])

    async def is_silent(self) -> bool:
        """Whether a step brings nothing."""
        return not await self.step()


async def until(condition: Callable[[], Awaitable[object]], pause_s: float = 0.01) -> None:
    """Ask again and again until `condition()` gives something true."""
    for _ in range(100_000):
        if await condition():
            return
        await asyncio.sleep(pause_s)
    raise AssertionError("it never became true")
