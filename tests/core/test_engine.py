"""The engine over a target without a model: same text whatever is drafted, and no block leaks."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from draftline.core.block_pool import BlockPool
from draftline.core.engine import EngineCore
from draftline.core.errors import CapacityError, DraftlineError, StageLost
from draftline.core.output import TARGET_SOURCE, Delta
from draftline.core.request import Request
from draftline.core.sampling_params import SamplingParams
from draftline.core.scheduler import Scheduler, SchedulerLimits
from draftline.core.stop import StopRule
from draftline.core.types import ROOT, DraftRequest, Probe, Proposal, Query, StepCommit
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_target import FakeTarget, next_token, plain_answer

VOCAB = 7
BLOCK = 4


class NoText:
    def push(self, _token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class RandomDrafters:
    """Random trees, half of whose nodes are what the target will say; checks what it is told."""

    def __init__(self, rng: np.random.Generator, probes: bool) -> None:
        self.rng = rng
        self.probes = probes
        self.texts: dict[str, list[int]] = {}
        self.seeds: dict[str, int] = {}
        self.probe_answers = 0

    def open(self, request: DraftRequest) -> None:
        assert request.request_id not in self.texts
        self.texts[request.request_id] = request.token_ids.tolist()
        self.seeds[request.request_id] = request.seed

    def close(self, request_id: str) -> None:
        self.texts.pop(request_id, None)

    async def exchange(
        self, commits: Sequence[StepCommit], queries: Sequence[Query]
    ) -> dict[str, list[Proposal]]:
        for commit in commits:
            text = self.texts[commit.request_id]
            assert len(text) == commit.base_len
            text += commit.tokens.tolist()
            for answer in commit.probe_ids.values():
                assert answer.shape == (2, 3)
                self.probe_answers += 1
        await asyncio.sleep(0)
        return {query.request_id: self._propose(query) for query in queries}

    def _propose(self, query: Query) -> list[Proposal]:
        text = self.texts[query.request_id]
        assert len(text) == query.committed_len
        assert query.max_nodes >= 1
        return [self._tree(name, query, text) for name in ("first", "second")]

    def _tree(self, source: str, query: Query, text: list[int]) -> Proposal:
        tokens, parents, paths = [], [], []
        for node in range(int(self.rng.integers(0, 12))):
            parent = int(self.rng.integers(ROOT, node)) if node else ROOT
            path = [*(paths[parent] if parent >= 0 else text)]
            right = next_token(path, self.seeds[query.request_id], VOCAB)
            token = right if self.rng.random() < 0.7 else int(self.rng.integers(0, VOCAB))
            tokens.append(token)
            parents.append(parent)
            paths.append([*path, token])
        probe = self._probe() if self.probes and self.rng.random() < 0.5 else None
        nodes = np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32)
        return Proposal(source, *nodes, np.zeros(len(tokens), dtype=np.float32), probe)

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
    heard: dict[str, list[Delta | DraftlineError]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.target = FakeTarget(VOCAB, BLOCK, self.num_groups)
        self.pool = BlockPool(self.num_blocks, BLOCK)
        self.drafters = RandomDrafters(np.random.default_rng(self.seed), self.probes)
        limits = SchedulerLimits(
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_step_rows=self.rows,
            max_tree_nodes=self.nodes,
            max_probe_rows=6,
            num_groups=self.num_groups,
        )
        self.scheduler = Scheduler(self.pool, limits)
        self.core = EngineCore(self.target, self.drafters, self.scheduler, BLOCK, lambda: 0.0)

    def add(self, name: str, prompt: list[int], max_tokens: int, speculative: bool = True) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(
            request_id=name,
            prompt_ids=np.array(prompt, dtype=np.int32),
            params=params,
            seed=len(name),
            max_tokens=max_tokens,
            sink=self.heard.setdefault(name, []).append,
            speculative=speculative,
        )
        self.core.add(request, StopRule(params, (), max_tokens, NoText()))

    async def run(self) -> None:
        while self.core.has_work:
            await self.core.step()

    def tokens(self, name: str) -> list[int]:
        deltas = [event for event in self.heard[name] if isinstance(event, Delta)]
        assert all(len(d.token_ids) == len(d.sources) for d in deltas)
        return [token for delta in deltas for token in delta.token_ids]

    def check_empty(self) -> None:
        self.pool.check()
        assert self.pool.num_free == self.num_blocks
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.drafters.texts
        assert not self.core.has_work


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60),
        st.integers(1, 30),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=40)
@given(requests, st.integers(0, 2**31), st.integers(1, 3), st.booleans(), st.integers(16, 80))
def test_text_is_that_of_plain_decoding(
    found: list[tuple[list[int], int, bool]], seed: int, groups: int, probes: bool, rows: int
) -> None:
    bench = Bench(seed=seed, num_groups=groups, probes=probes, rows=rows)

    async def scenario() -> None:
        for index, (prompt, max_tokens, speculative) in enumerate(found):
            bench.add("r" * (index + 1), prompt, max_tokens, speculative)
        await bench.run()

    asyncio.run(scenario())
    for index, (prompt, max_tokens, _) in enumerate(found):
        name = "r" * (index + 1)
        assert bench.tokens(name) == plain_answer(prompt, max_tokens, len(name), VOCAB)
        last = bench.heard[name][-1]
        assert isinstance(last, Delta)
        assert last.finish_reason == "length"
        assert last.metrics is not None
        assert last.metrics.generated_tokens == max_tokens
    bench.check_empty()


@settings(deadline=None, max_examples=40)
@given(requests, st.integers(0, 2**31), st.integers(1, 3), st.data())
def test_no_block_leaks_after_any_order_of_finish_cancel_and_failure(
    found: list[tuple[list[int], int, bool]], seed: int, groups: int, data: st.DataObject
) -> None:
    bench = Bench(seed=seed, num_groups=groups, max_running=3, num_blocks=80)
    names = ["r" * (index + 1) for index in range(len(found))]
    failing = data.draw(st.booleans())

    async def scenario() -> None:
        for name, (prompt, max_tokens, speculative) in zip(names, found, strict=True):
            bench.add(name, prompt, max_tokens, speculative)
        for _ in range(data.draw(st.integers(0, 25))):
            await bench.core.step()
            if data.draw(st.integers(0, 3)) == 0:
                bench.core.cancel(data.draw(st.sampled_from(names)))
        bench.target.lost = failing
        if failing and bench.core.has_work:
            with pytest.raises(StageLost):
                await bench.run()
        await bench.run()

    asyncio.run(scenario())
    bench.check_empty()
    for name, (prompt, max_tokens, _) in zip(names, found, strict=True):
        whole = plain_answer(prompt, max_tokens, len(name), VOCAB)
        assert whole[: len(bench.tokens(name))] == bench.tokens(name)
        last = bench.heard[name][-1]
        assert isinstance(last, StageLost) or last.finish_reason in {"length", "cancelled"}


async def test_accepted_nodes_are_credited_to_their_drafter() -> None:
    bench = Bench(seed=3)
    bench.add("a", [1, 2, 3], 60)
    await bench.run()
    last = bench.heard["a"][-1]
    assert isinstance(last, Delta)
    assert last.metrics is not None
    metrics = last.metrics
    assert metrics.num_steps < 40
    assert metrics.acceptance_length == 59 / metrics.num_steps
    sources = [source for d in bench.heard["a"] if isinstance(d, Delta) for source in d.sources]
    drafted = len(sources) - sources.count(TARGET_SOURCE)
    assert metrics.num_accepted_tokens == drafted == sum(metrics.accepted_lengths)
    assert set(metrics.accepted_by_source) == {"first", "second"}


async def test_probes_are_answered() -> None:
    bench = Bench(probes=True)
    bench.add("a", [1, 2, 3], 60)
    await bench.run()
    assert bench.drafters.probe_answers > 3


async def test_several_groups_keep_several_steps_in_flight() -> None:
    bench = Bench(num_groups=2, max_running=4)
    for name in ("a", "bb", "ccc", "dddd"):
        bench.add(name, [1, 2, 3], 20)
    await bench.run()
    decode_steps = [step for step in bench.target.steps if all(t is not None for t in step.trees)]
    assert max(len(step.trees) for step in decode_steps) == 2


async def test_a_full_queue_refuses() -> None:
    bench = Bench(max_running=1, max_waiting=1)
    bench.add("a", [1], 4)
    bench.add("bb", [1], 4)
    with pytest.raises(CapacityError, match="waiting"):
        bench.add("ccc", [1], 4)
    await bench.run()
    assert len(bench.tokens("bb")) == 4


async def test_a_request_that_can_never_fit_is_refused() -> None:
    bench = Bench(num_blocks=8)
    with pytest.raises(CapacityError, match="max_tokens"):
        bench.add("a", [1], 1000)
    bench.check_empty()


async def test_prompts_are_cut_in_chunks_beside_decoding_requests() -> None:
    bench = Bench(rows=20, nodes=8)
    bench.add("a", [1, 2], 40)
    for _ in range(6):
        await bench.core.step()
    bench.add("bb", [3] * 50, 5)
    await bench.run()
    mixed = [s for s in bench.target.steps if any(t is None for t in s.trees) and len(s.trees) > 1]
    assert mixed
    assert all(len(step.token_ids) <= 20 for step in bench.target.steps)
    assert bench.tokens("bb") == plain_answer([3] * 50, 5, 2, VOCAB)
