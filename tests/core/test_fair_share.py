"""Tenants get their parts of the work, one that floods holds nobody up, and no text changes."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from draftline.core.errors import CapacityError, RequestError
from draftline.core.fair_share import PROMPT_WEIGHT, ROW_WEIGHT
from draftline.core.request.output import Delta
from draftline.core.request.request import RequestState
from draftline.core.request.sampling_params import RequestOptions
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.fakes.fake_bench import Bench
from support.fakes.fake_target import plain_answer

VOCAB = 7


class Backlog:
    """Tenants that always have requests waiting, and what each of their requests took.

    kinds  by tenant: weight, length of prompts and of answers
    """

    def __init__(self, bench: Bench, kinds: dict[str, tuple[float, int, int]]) -> None:
        self.bench = bench
        self.kinds = kinds
        self.states: dict[str, list[RequestState]] = {name: [] for name in kinds}

    def fill(self) -> None:
        for name, (weight, prompt_len, max_tokens) in self.kinds.items():
            waiting = [s for s in self.bench.scheduler.waiting if tenant_of(s) == name]
            for _ in range(8 - len(waiting)):
                self.add(name, weight, prompt_len, max_tokens)

    def add(self, name: str, weight: float, prompt_len: int, max_tokens: int) -> str:
        states = self.states[name]
        request_id = f"{name}{len(states)}"
        prompt = [(len(states) + place) % VOCAB for place in range(prompt_len)]
        self.bench.add(
            request_id, prompt, max_tokens, seed=len(states), tenant=name, weight=weight,
            speculative=name != "plain",
        )  # fmt: skip
        states.append(self.bench.core._states[request_id])
        return request_id

    def work(self) -> dict[str, float]:
        """Rows of prompts and trees by tenant, each by its weight, divided by the tenant's."""
        done = {}
        for name, (weight, _, _) in self.kinds.items():
            done[name] = sum(map(work_of, self.states[name])) / weight
        return done

    def check_texts(self) -> None:
        for name in self.kinds:
            for number, state in enumerate(self.states[name]):
                said = self.bench.tokens(state.request_id)
                prompt = state.request.prompt_ids.tolist()
                whole = plain_answer(prompt, state.request.max_tokens, number, VOCAB)
                assert said == whole[: len(said)]


def tenant_of(state: RequestState) -> str:
    return state.request.options.tenant


def work_of(state: RequestState) -> float:
    rows = state.stats.nodes.totals.drafted.total() + len(state.stats.accepted_lengths)
    prompt = state.prompt_len if state.has_answer else state.kv.num_scheduled
    return PROMPT_WEIGHT * prompt + ROW_WEIGHT * rows


# Few, for each takes a second; and without shrinking, which would take minutes.
@settings(max_examples=settings().max_examples // 10, phases=[Phase.generate])
@given(
    st.integers(0, 2**31),
    st.lists(
        st.tuples(
            st.sampled_from([1.0, 1.0, 2.0]), st.integers(1, 20), st.sampled_from([4, 9, 16])
        ),
        min_size=2,
        max_size=3,
    ),
    st.integers(1, 2),
    st.booleans(),
)
def test_tenants_that_wait_all_along_get_equal_parts(
    seed: int, kinds: list[tuple[float, int, int]], num_groups: int, has_plain: bool
) -> None:
    names = ["plain" if has_plain else "a", "b", "c"]
    bench = Bench(
        seed=seed, num_blocks=200, max_running=6, num_groups=num_groups, share_prefixes=False
    )
    backlog = Backlog(bench, dict(zip(names, kinds, strict=False)))

    async def scenario() -> dict[str, float]:
        for _ in range(60):
            backlog.fill()
            await bench.core.step()
        before = backlog.work()
        for _ in range(900):
            backlog.fill()
            await bench.core.step()
        after = backlog.work()
        return {name: after[name] - before[name] for name in after}

    done = asyncio.run(scenario())
    mean = sum(done.values()) / len(done)
    assert all(abs(work / mean - 1) <= 0.1 for work in done.values()), done
    backlog.check_texts()


async def first_token_steps(bench: Bench, name: str) -> int:
    """Steps of the pipeline from now to the one that gives a request its first token."""
    before = bench.core.num_steps
    while not bench.heard[name]:
        await bench.core.step()
    return bench.core.num_steps - before


@pytest.mark.parametrize("num_blocks", [400, 60], ids=["free", "short of KV"])
async def test_one_that_floods_holds_nobody_up(num_blocks: int) -> None:
    bench = Bench(num_blocks=num_blocks, max_running=4, max_waiting=100, share_prefixes=False)
    flood = Backlog(bench, {"flood": (1.0, 8, 60), "quiet": (1.0, 8, 6)})
    alone = await first_token_steps(bench, flood.add("quiet", 1.0, 8, 6))
    await bench.run()
    for _ in range(60):
        flood.add("flood", 1.0, 8, 60)
    for _ in range(30):
        await bench.core.step()
    waits = []
    for _ in range(8):
        waits.append(await first_token_steps(bench, flood.add("quiet", 1.0, 8, 6)))
        assert sum(tenant_of(state) == "flood" for state in bench.scheduler.waiting) > 10
        while not flood.states["quiet"][-1].has_ended:
            await bench.core.step()
    assert max(waits) <= alone + 1
    await bench.run()
    flood.check_texts()
    bench.check_empty()


async def test_a_full_queue_has_places_for_those_that_have_few() -> None:
    bench = Bench(max_running=2, max_waiting=6)
    backlog = Backlog(bench, {"flood": (1.0, 4, 5), "quiet": (1.0, 4, 5), "third": (1.0, 4, 5)})
    for _ in range(8):
        backlog.add("flood", 1.0, 4, 5)
    with pytest.raises(CapacityError):
        backlog.add("flood", 1.0, 4, 5)
    for _ in range(4):
        backlog.add("quiet", 1.0, 4, 5)
    with pytest.raises(CapacityError):
        backlog.add("quiet", 1.0, 4, 5)
    for _ in range(2):
        backlog.add("third", 1.0, 4, 5)
    with pytest.raises(CapacityError):
        backlog.add("third", 1.0, 4, 5)
    await bench.run()
    backlog.check_texts()


async def test_what_was_not_used_is_not_saved_up() -> None:
    bench = Bench(max_running=2, num_blocks=200)
    backlog = Backlog(bench, {"early": (1.0, 4, 10), "late": (1.0, 4, 10)})
    for name in ("early", "late"):
        backlog.add(name, 1.0, 4, 10)
    for _ in range(40):
        backlog.add("early", 1.0, 4, 10)
    for _ in range(60):
        await bench.core.step()
    counters = bench.scheduler.fair.counters
    assert counters["early"] > counters["late"] > 0
    before = counters["early"]
    for _ in range(10):
        backlog.add("late", 1.0, 4, 10)
    assert bench.scheduler.fair.counters["late"] >= before
    await bench.run()


async def test_alone_the_order_is_that_of_arrival_and_nothing_is_counted() -> None:
    bench = Bench(max_running=2)
    backlog = Backlog(bench, {"one": (1.0, 4, 5)})
    for _ in range(6):
        backlog.add("one", 1.0, 4, 5)
    await bench.run()
    assert bench.scheduler.fair.counters == {"one": 0.0}
    assert bench.scheduler.num_preemptions == 0
    ends = [name for name, heard in bench.heard.items() if isinstance(heard[-1], Delta)]
    assert ends == [f"one{number}" for number in range(6)]


async def test_priority_goes_before_turns() -> None:
    bench = Bench(max_running=4, num_blocks=200)
    for number in range(12):
        bench.add(f"first{number}", [1, 2, 3], 8, tenant="a", priority=-1)
    bench.add("other", [1, 2, 3], 8, tenant="b")
    started = Counter[str]()
    while bench.core.has_work:
        await bench.core.step()
        started.update(set(bench.scheduler.running) - set(started))
    assert list(started)[-1] == "other"


def test_a_weight_is_above_zero() -> None:
    with pytest.raises(RequestError, match="weight"):
        RequestOptions(weight=0.0)
