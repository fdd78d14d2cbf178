"""The engine over a target without a model: same text whatever is drafted, and no block leaks."""

import asyncio

import pytest
from draftline.core.errors import CapacityError, RequestError, StageLost
from draftline.core.request.output import TARGET_SOURCE, Delta
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes.fake_bench import Bench
from support.fakes.fake_target import plain_answer

VOCAB = 7


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
@given(
    requests,
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.fixed_dictionaries({"probes": st.booleans(), "top_next_tokens": st.booleans()}),
    st.integers(16, 80),
    st.sampled_from([0.0, 3.0, 40.0]),
)
def test_text_is_that_of_plain_decoding(
    found: list[tuple[list[int], int, bool]],
    seed: int,
    groups: int,
    wishes: dict[str, bool],
    rows: int,
    multi_step_s: float,
) -> None:
    bench = Bench(seed=seed, num_groups=groups, rows=rows, multi_step_s=multi_step_s, **wishes)

    async def scenario() -> None:
        for index, (prompt, max_tokens, speculative) in enumerate(found):
            bench.add("r" * (index + 1), prompt, max_tokens, speculative)
        await bench.run()

    asyncio.run(scenario())
    for index, (prompt, max_tokens, speculative) in enumerate(found):
        name = "r" * (index + 1)
        assert bench.tokens(name) == plain_answer(prompt, max_tokens, len(name), VOCAB)
        if speculative and max_tokens > 1:
            assert bench.drafters.ended[name] == prompt + bench.tokens(name)
        last = bench.heard[name][-1]
        assert isinstance(last, Delta)
        assert last.finish_reason == "length"
        assert last.metrics is not None
        assert last.metrics.generated_tokens == max_tokens
    bench.check_empty()


@settings(deadline=None, max_examples=40)
@given(
    requests,
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.sampled_from([0.0, 3.0]),
    st.data(),
)
def test_no_block_leaks_after_any_order_of_finish_cancel_and_failure(
    found: list[tuple[list[int], int, bool]],
    seed: int,
    groups: int,
    multi_step_s: float,
    data: st.DataObject,
) -> None:
    bench = Bench(
        seed=seed, num_groups=groups, max_running=3, num_blocks=80, multi_step_s=multi_step_s
    )
    names = ["r" * (index + 1) for index in range(len(found))]
    failing, replaced = data.draw(st.booleans()), data.draw(st.booleans())

    async def scenario() -> None:
        for name, (prompt, max_tokens, speculative) in zip(names, found, strict=True):
            bench.add(name, prompt, max_tokens, speculative)
        for _ in range(data.draw(st.integers(0, 25))):
            await bench.core.step()
            if data.draw(st.integers(0, 3)) == 0:
                bench.core.cancel(data.draw(st.sampled_from(names)))
        bench.target.lost = failing
        # Without a further step nobody notices the loss.
        await bench.run_over_a_loss(replaced=replaced)

    asyncio.run(scenario())
    bench.check_empty()
    for name, (prompt, max_tokens, _) in zip(names, found, strict=True):
        whole = plain_answer(prompt, max_tokens, len(name), VOCAB)
        assert whole[: len(bench.tokens(name))] == bench.tokens(name)
        last = bench.heard[name][-1]
        is_cut = isinstance(last, StageLost) or last.finish_reason == "cancelled"
        assert is_cut or bench.tokens(name) == whole
        assert not isinstance(last, StageLost) or (failing, replaced) == (True, False)


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


async def test_trees_are_as_wide_at_the_end_of_an_answer_as_anywhere() -> None:
    bench = Bench(seed=3, is_adaptive=False)
    bench.add("a", [1, 2, 3], 60)
    await bench.run()
    sizes = {query.max_nodes for query in bench.drafters.queries}
    assert len(sizes) == 1
    # Only what is left of the answer bounds how deep they are.
    assert max(step.positions.max() for step in bench.target.steps) == 3 + 60 - 2
    assert max(query.committed_len for query in bench.drafters.queries) > 63 - max(sizes)


async def test_probes_are_answered() -> None:
    bench = Bench(probes=True, is_adaptive=False)
    bench.add("a", [1, 2, 3], 60)
    await bench.run()
    assert bench.drafters.probe_answers > 3


async def test_top_next_tokens_are_told_of_every_row_of_every_tree() -> None:
    bench = Bench(top_next_tokens=True)
    for name in ("a", "bb"):
        bench.add(name, [1, 2, 3], 60)
    await bench.run()
    steps = [step for step in bench.target.steps if len(step.probes.rows)]
    assert bench.drafters.successor_rows > 100
    # Asked for alone, the rows are those of whole trees: of the answers' rows, some or all.
    assert all(set(step.probes.rows.tolist()) <= set(step.logits_rows.tolist()) for step in steps)
    assert max(step.probes.top_k for step in steps) == 4


async def test_rows_that_nobody_asks_for_are_not_ranked() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], 30)
    await bench.run()
    assert sum(len(step.logits_rows) for step in bench.target.steps) > 40
    assert not any(len(step.probes.rows) or step.probes.top_k for step in bench.target.steps)


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
    with pytest.raises(RequestError, match="KV cache of 32") as caught:
        bench.add("a", [1], 1000)
    assert caught.value.field == "max_tokens"
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
