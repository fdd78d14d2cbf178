"""An engine over fakes: a target without a model and drafters that guess half right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from draftline.core.arrays import ROOT
from draftline.core.engine import EngineCore
from draftline.core.errors import DraftlineError, StageLost
from draftline.core.kv_cache import BlockPool
from draftline.core.pipelined.drafting import PipelinedDrafting
from draftline.core.proposals import (
    DraftCost,
    Drafted,
    DraftRequest,
    FeatureRows,
    Probe,
    Proposal,
    Query,
    StepCommit,
    TopNextTokens,
)
from draftline.core.request.output import Delta
from draftline.core.request.request import Request
from draftline.core.request.sampling_params import PipeliningMode, RequestOptions, SamplingParams
from draftline.core.request.stop import StopRule
from draftline.core.scheduler import Scheduler, SchedulerLimits
from draftline.core.speculation.multi_step import MultiStep
from draftline.core.speculation.policy import SpeculationPolicy
from draftline.core.step.trace import StepTrace
from support.fakes.fake_target import FakeTarget, next_token, plain_answer, top_ids
from support.fakes.no_pace import NoPace


class NoText:
    def push(self, _token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class RandomDrafters:
    """Random trees, half of whose nodes are what the target will say; checks what it is told."""

    def __init__(
        self,
        rng: np.random.Generator,
        probes: bool,
        vocab: int,
        memory: int | None,
        *,
        top_next_tokens: bool = False,
        features: bool = False,
        heads: bool = False,
    ) -> None:
        self.rng = rng
        self.stage_heads = ("ahead",) if heads else ()
        self.drafted: dict[str, tuple[int, Proposal]] = {}
        self.num_drafted = self.num_taken = self.num_stale = 0
        self.feature_drafters = frozenset({"second"} if features else ())
        self.features: dict[str, list[FeatureRows]] = {}
        self.feature_rows = 0
        self.feature_ends: dict[str, int] = {}
        self.top_next_tokens = top_next_tokens
        self.wishes: dict[tuple[str, str], int] = {}
        self.successor_rows = 0
        self.vocab = vocab
        self.memory = memory
        self.probes = probes
        self.texts: dict[str, list[int]] = {}
        self.ended: dict[str, list[int]] = {}
        self.seeds: dict[str, int] = {}
        self.probe_answers = 0
        self.asked: set[tuple[str, str]] = set()
        self.queries: list[Query] = []
        self.drafter_costs = {"first": DraftCost(), "second": DraftCost()}
        if heads:
            self.drafter_costs["ahead"] = DraftCost(is_ahead=True)

    def open(self, request: DraftRequest, at_once: Collection[str] | None = None) -> None:
        del at_once
        assert request.request_id not in self.texts
        self.texts[request.request_id] = request.token_ids.tolist()
        self.seeds[request.request_id] = request.seed

    def close(self, request_id: str, last: Sequence[StepCommit] = ()) -> None:
        self.features.pop(request_id, None)
        self.feature_ends.pop(request_id, None)
        self.drafted.pop(request_id, None)
        text = self.texts.pop(request_id)
        for commit in last:
            assert len(text) == commit.base_len
            text += commit.tokens.tolist()
        self.ended[request_id] = text

    async def exchange(
        self,
        commits: Sequence[StepCommit],
        queries: Sequence[Query],
        asked: Mapping[str, Collection[str]] | None = None,
    ) -> dict[str, list[Proposal]]:
        by_drafter = asked or {}
        self.asked.update((name, one) for name, ids in by_drafter.items() for one in ids)
        self.queries += queries
        for commit in commits:
            text = self.texts[commit.request_id]
            assert len(text) == commit.base_len
            text += commit.tokens.tolist()
            for answer in commit.probe_ids.values():
                assert answer.shape == (2, 3)
                self.probe_answers += 1
            for source, heard in commit.top_next_tokens.items():
                self._check_heard(commit, heard, self.wishes[commit.request_id, source])
        await asyncio.sleep(0)
        return {query.request_id: self._propose(query, by_drafter) for query in queries}

    def costs(self) -> dict[str, DraftCost]:
        return self.drafter_costs

    remote = frozenset[str]()

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        assert self.feature_drafters
        for own in rows:
            if own.request_id in self.texts:
                self.features.setdefault(own.request_id, []).append(own)

    def note_drafted(self, drafted: Sequence[Drafted]) -> None:
        for own in drafted:
            assert own.source in self.stage_heads
            assert own.seconds == 0.25
            for request_id, length, proposal in own.proposals:
                self.num_drafted += 1
                if request_id in self.texts:
                    self.drafted[request_id] = length, proposal

    def _taken(self, query: Query) -> list[Proposal]:
        """What was drafted a step before, which is for just this text."""
        length, proposal = self.drafted.pop(query.request_id, (None, None))
        if proposal is None or length != query.committed_len:
            self.num_stale += proposal is not None
            return []
        self.num_taken += 1
        return [proposal]

    def _check_features(self, request_id: str) -> int:
        """They are of the tokens at their positions; the position behind the newest."""
        text, end = self.texts[request_id], self.feature_ends.get(request_id, 0)
        rows = self.features.pop(request_id, [])
        # Of a stream more may be committed while this is asked: told of with the next message.
        self.features[request_id] = [own for own in rows if own.position >= len(text) - 1]
        for own in rows:
            if own.position >= len(text) - 1:
                continue
            end = own.position + len(own.values)
            tokens, positions = own.values.T.tolist()
            assert positions == list(range(own.position, end))
            assert tokens == text[own.position : end]
            self.feature_rows += len(tokens)
        self.feature_ends[request_id] = end
        return end

    def _check_heard(self, commit: StepCommit, heard: TopNextTokens, count: int) -> None:
        """Every row has what was asked for; the root's is the first, and no accepted one lacks."""
        assert heard.ids.shape == (len(heard.tokens), count)
        self.successor_rows += len(heard.tokens)
        rows = list(zip(heard.tokens.tolist(), heard.ids.tolist(), strict=True))
        text = self.texts[commit.request_id]
        expected = [
            (text[end - 1], top_ids(text[:end], count, self.vocab).tolist())
            for end in range(commit.base_len, len(text))
        ]
        assert rows[0] == expected[0]
        assert all(row in rows for row in expected)

    def _propose(self, query: Query, asked: Mapping[str, Collection[str]]) -> list[Proposal]:
        text = self.texts.get(query.request_id)
        # Closed while this was awaited, and perhaps begun anew with another text.
        if text is None or len(text) < query.committed_len:
            return []
        assert len(text) == query.committed_len
        assert query.max_nodes >= 1
        names = [name for name in ("first", "second") if query.request_id in asked.get(name, ())]
        ahead = self._taken(query) if query.request_id in asked.get("ahead", ()) else []
        assert names or "ahead" in asked
        if not self.feature_drafters.isdisjoint(names):
            end = self._check_features(query.request_id)
            # Told at the opening already, so that none is missing.
            assert end == len(text) - 1
        behind = [*text, *(query.assumed or ())]
        return [*(self._tree(name, query, behind) for name in names), *ahead]

    def _tree(self, source: str, query: Query, text: list[int]) -> Proposal:
        tokens, parents, paths = [], [], []
        for node in range(int(self.rng.integers(0, 12))):
            parent = int(self.rng.integers(ROOT, node)) if node else ROOT
            path = [*(paths[parent] if parent >= 0 else text)]
            right = next_token(path, self.seeds[query.request_id], self.vocab, self.memory)
            token = right if self.rng.random() < 0.7 else int(self.rng.integers(0, self.vocab))
            tokens.append(token)
            parents.append(parent)
            paths.append([*path, token])
        probe = self._probe() if self.probes and self.rng.random() < 0.5 else None
        nodes = np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32)
        wish = int(self.rng.integers(0, 5)) if self.top_next_tokens else 0
        self.wishes[query.request_id, source] = wish
        return Proposal(source, *nodes, np.zeros(len(tokens), dtype=np.float32), probe, wish)

    def _probe(self) -> Probe:
        return Probe(
            tokens=np.array([1, 2, 3], dtype=np.int32),
            offsets=np.array([1, 2, 2], dtype=np.int32),
            mask=np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=np.bool_),
            wanted=np.array([1, 2], dtype=np.int32),
            top_k=3,
        )


@dataclass
class Bench:
    """An engine over fakes, and what each request's sink heard."""

    num_blocks: int = 64
    rows: int = 40
    nodes: int = 10
    max_running: int = 4
    max_waiting: int = 100
    num_groups: int = 1
    seed: int = 0
    probes: bool = False
    top_next_tokens: bool = False
    vocab: int = 7
    block_size: int = 4
    memory: int | None = 2
    clock: Callable[[], float] = lambda: 0.0
    share_prefixes: bool = True
    trace: StepTrace | None = None
    is_adaptive: bool = True
    # Whether a drafter reads the target's features; of those it is asked for all along.
    features: bool = False
    # Whether a head of the last stage drafts.
    heads: bool = False
    pipelined_trees: PipeliningMode = "off"
    most_turns: int = 0  # of the loop that a step may be on its way
    # Seconds of a step of several tokens, where a round of one takes a second.
    multi_step_s: float = 0.0
    heard: dict[str, list[Delta | DraftlineError]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.target = self._new_target()
        self.pool = BlockPool(self.num_blocks, self.block_size)
        self.drafters = RandomDrafters(
            np.random.default_rng(self.seed),
            self.probes,
            self.vocab,
            self.memory,
            top_next_tokens=self.top_next_tokens,
            features=self.features,
            heads=self.heads,
        )
        limits = SchedulerLimits(
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_step_rows=self.rows,
            max_tree_nodes=self.nodes,
            max_probe_rows=6,
            num_groups=self.num_groups,
            share_prefixes=self.share_prefixes,
        )
        self.scheduler = Scheduler(self.pool, limits)
        self.policy = SpeculationPolicy(
            is_adaptive=self.is_adaptive, multi_step=MultiStep(self.multi_step_s)
        )
        self.use_target(self.target)

    def use_target(self, target: FakeTarget) -> None:
        self.target = target
        self.core = EngineCore(
            target, self.drafters, self.scheduler, self.policy, self.clock, trace=self.trace,
            pipelined_trees=self.pipelined_trees,
        )  # fmt: skip
        if isinstance(self.core.drafting, PipelinedDrafting):
            self.core.drafting.pace = NoPace(self.num_groups)

    def _new_target(self) -> FakeTarget:
        make = partial(FakeTarget, self.vocab, self.block_size, self.num_groups, memory=self.memory)
        if not self.most_turns:
            return make()
        rng = np.random.default_rng(self.seed)
        return make(turns=lambda: int(rng.integers(0, self.most_turns + 1)))

    def replace_target(self) -> None:
        """What a recovery does after `StageLost`."""
        self.target = self._new_target()
        self.core.use_pipeline(self.target)

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        speculative: bool = True,
        *,
        temperature: float = 1.0,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        request = Request(
            request_id=name,
            prompt_ids=np.array(prompt, dtype=np.int32),
            params=params,
            seed=len(name) if seed is None else seed,
            max_tokens=max_tokens,
            sink=self.heard.setdefault(name, []).append,
            options=RequestOptions(speculative=speculative, **options),
        )
        self.core.add(request, StopRule(params, (), max_tokens, NoText()))

    @property
    def most_in_flight(self) -> int:
        """Most steps that were on their way at once."""
        return self.target.most_on_their_way

    async def run(self) -> None:
        while self.core.has_work:
            await self.core.step()

    async def run_three(self, seed: int) -> None:
        """Run three random prompts of rising length; their answers are plain decoding's."""
        rng = np.random.default_rng(seed)
        lengths = {"a": 3, "b": 10, "c": 17}
        prompts = {name: rng.integers(0, 7, count).tolist() for name, count in lengths.items()}
        for name, prompt in prompts.items():
            self.add(name, prompt, 9)
        await self.run()
        for name, prompt in prompts.items():
            assert self.tokens(name) == plain_answer(prompt, 9, len(name), 7)

    async def run_over_a_loss(self, *, replaced: bool) -> None:
        """Run; after a lost stage with another target, or without the requests that ran."""
        try:
            await self.run()
        except StageLost as error:
            if replaced:
                self.replace_target()
            else:
                self.core.fail_all(error)
            await self.run()

    def tokens(self, name: str) -> list[int]:
        deltas = [event for event in self.heard[name] if isinstance(event, Delta)]
        assert all(len(d.token_ids) == len(d.sources) for d in deltas)
        return [token for delta in deltas for token in delta.token_ids]

    def check_empty(self) -> None:
        self.pool.check()
        assert self.pool.num_free == self.num_blocks
        assert self.scheduler.running == self.drafters.texts == {}
        assert not self.scheduler.waiting
        assert self.pipelined_trees != "off" or not self.drafters.num_stale
        assert not self.core.has_work
