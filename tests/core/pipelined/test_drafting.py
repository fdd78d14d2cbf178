"""Trees in chunks: several steps of one request in flight, over a target without a model.

The fake target reads every row's text through its KV cache, so that a slot that is used twice,
moved wrongly or freed too soon fails an assertion there or changes the text.
"""

import asyncio
import random
from dataclasses import replace

from draftline.core.errors import StageLost
from draftline.core.request.output import TARGET_SOURCE, Delta
from draftline.core.request.sampling_params import PipeliningMode
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.fakes.fake_bench import Bench
from support.fakes.fake_target import plain_answer

VOCAB = 7

requests = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), st.integers(1, 40)),
    min_size=1,
    max_size=8,
)


# A drafter that goes on from features, and is too slow to go on behind chunks.
@example([([0], 2), ([0], 6), ([0], 3)], 1, 2, 6, 24, False, False, (True, False), False, False)
# One of another process is asked for a request for which none of this one is.
@example(
    [([0], 3), ([0], 11), ([0], 9), ([0], 5)], 0, 2, 1, 24, True, False, (False, False), False, True
)
# A request is put off and goes on while others fill the pool.
@example(
    [([0, 0, 1], 34), ([0], 10), ([0], 11), ([0] * 12, 25), ([0] * 7 + [1] + [0] * 10, 16)],
    3, 2, 12, 27, True, True, (False, False), True, True,
)  # fmt: skip
@settings(deadline=None, max_examples=40)
@given(
    requests,
    st.integers(0, 2**31),
    st.integers(2, 9),
    st.integers(1, 12),
    st.integers(24, 120),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_text_is_that_of_plain_decoding(
    found: list[tuple[list[int], int]],
    seed: int,
    groups: int,
    turns: int,
    num_blocks: int,
    is_adaptive: bool,
    probes: bool,
    features: bool,
    heads: bool,
    is_remote: bool,
) -> None:
    bench = Bench(
        seed=seed, num_groups=groups, most_turns=turns, num_blocks=num_blocks, pipelined_trees="on",
        is_adaptive=is_adaptive, probes=probes, heads=heads,
        # Of drafters that are asked for now and then, some are missing.
        features=features and not is_adaptive,
    )  # fmt: skip
    if is_remote and not bench.drafters.feature_drafters:
        bench.drafters.remote = frozenset({"second"})

    async def scenario() -> None:
        for index, (prompt, max_tokens) in enumerate(found):
            bench.add("r" * (index + 1), prompt, max_tokens)
        changes = asyncio.create_task(change_costs(bench, random.Random(seed)))
        await bench.run()
        changes.cancel()

    asyncio.run(scenario())
    for index, (prompt, max_tokens) in enumerate(found):
        name = "r" * (index + 1)
        assert bench.tokens(name) == plain_answer(prompt, max_tokens, len(name), VOCAB)
        last = bench.heard[name][-1]
        assert isinstance(last, Delta)
        assert last.metrics is not None
        assert last.metrics.generated_tokens == max_tokens
    bench.check_empty()


async def change_costs(bench: Bench, rng: random.Random) -> None:
    """Drafters are dear now and then, so that nobody is asked for what begins then."""
    while True:
        seconds = 1000.0 * (rng.random() < 0.3)
        for name, cost in bench.drafters.drafter_costs.items():
            bench.drafters.drafter_costs[name] = replace(cost, message_s=seconds)
        for _ in range(rng.randint(1, 30)):
            await asyncio.sleep(0)


@settings(deadline=None, max_examples=40)
@given(requests, st.integers(0, 2**31), st.integers(2, 9), st.integers(1, 12), st.data())
def test_no_block_leaks_after_any_order_of_finish_cancel_and_failure(
    found: list[tuple[list[int], int]], seed: int, groups: int, turns: int, data: st.DataObject
) -> None:
    bench = Bench(
        seed=seed, num_groups=groups, most_turns=turns, max_running=3, num_blocks=80,
        pipelined_trees="on",
    )  # fmt: skip
    names = ["r" * (index + 1) for index in range(len(found))]
    failing, replaced = data.draw(st.booleans()), data.draw(st.booleans())

    async def scenario() -> None:
        for name, (prompt, max_tokens) in zip(names, found, strict=True):
            bench.add(name, prompt, max_tokens)
        for _ in range(data.draw(st.integers(0, 40))):
            await bench.core.step()
            if data.draw(st.integers(0, 5)) == 0:
                bench.core.cancel(data.draw(st.sampled_from(names)))
        bench.target.lost = failing
        # Without a further step nobody notices the loss.
        await bench.run_over_a_loss(replaced=replaced)

    asyncio.run(scenario())
    bench.check_empty()
    for name, (prompt, max_tokens) in zip(names, found, strict=True):
        whole = plain_answer(prompt, max_tokens, len(name), VOCAB)
        assert whole[: len(bench.tokens(name))] == bench.tokens(name)
        last = bench.heard[name][-1]
        is_cut = isinstance(last, StageLost) or last.finish_reason == "cancelled"
        assert is_cut or bench.tokens(name) == whole


def steps_of(streaming: PipeliningMode, num_requests: int = 1, groups: int = 9) -> Bench:
    """Requests that run to their ends, each step of which takes as long as all stages."""
    bench = Bench(
        seed=3, num_groups=groups, most_turns=12, num_blocks=400, pipelined_trees=streaming,
        max_running=num_requests, share_prefixes=False, is_adaptive=False,
    )  # fmt: skip
    for index in range(num_requests):
        bench.add("r" * (index + 1), [1, 2, 3], 100)
    asyncio.run(bench.run())
    return bench


def num_chunks(bench: Bench) -> int:
    """Trees that see nodes of earlier steps."""
    trees = [tree for step in bench.target.steps for tree in step.trees if tree is not None]
    return sum(len(tree.slots) > len(tree.ancestors) for tree in trees)


def test_one_request_fills_all_stages_and_many_go_in_rounds() -> None:
    assert num_chunks(steps_of("off")) == 0
    alone = steps_of("auto")
    assert num_chunks(alone) > 50
    assert alone.most_in_flight == 9
    # As many requests as steps in flight leave none a second one, but for the last to end.
    assert num_chunks(steps_of("auto", num_requests=9)) < 10
    assert num_chunks(steps_of("on", num_requests=9)) > 10
    # One stage has nothing to fill.
    assert num_chunks(steps_of("on", groups=1)) == 0


def test_a_request_may_be_left_out() -> None:
    bench = Bench(seed=3, num_groups=9, most_turns=12, num_blocks=400, pipelined_trees="auto")
    bench.add("a", [1, 2, 3], 100, pipelined_trees="off")
    asyncio.run(bench.run())
    assert num_chunks(bench) == 0


def test_accepted_nodes_are_credited_and_killed_ones_are_not() -> None:
    bench = steps_of("auto")
    last = bench.heard["r"][-1]
    assert isinstance(last, Delta)
    assert last.metrics is not None
    sources = [source for d in bench.heard["r"] if isinstance(d, Delta) for source in d.sources]
    drafted = len(sources) - sources.count(TARGET_SOURCE)
    assert last.metrics.num_accepted_tokens == drafted == sum(last.metrics.accepted_lengths)
    rows = sum(len(step.token_ids) for step in bench.target.steps)
    assert drafted < last.metrics.num_draft_tokens < rows


async def one_stream(**wishes: bool) -> Bench:
    """A request whose drafters are all asked, over nine flights."""
    bench = Bench(
        seed=3, num_groups=9, most_turns=12, num_blocks=400, pipelined_trees="auto",
        is_adaptive=False, **wishes,
    )  # fmt: skip
    bench.add("a", [1, 2, 3], 100)
    await bench.run()
    assert num_chunks(bench) > 20
    return bench


async def test_heads_draft_behind_slices_that_go_on_from_others() -> None:
    bench = await one_stream(heads=True)
    assert bench.tokens("a") == plain_answer([1, 2, 3], 100, 1, VOCAB)
    assert bench.target.num_behind_others > 3
    assert bench.drafters.num_taken > 2


async def test_probes_are_answered() -> None:
    bench = await one_stream(probes=True)
    assert bench.drafters.probe_answers > 1


async def test_features_of_nodes_come_with_their_commit() -> None:
    bench = await one_stream(features=True)
    # Each token's but the last one's, of the text of the last question, checked by the drafter.
    assert bench.drafters.feature_rows == bench.drafters.queries[-1].committed_len - 1
