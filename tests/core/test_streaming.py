"""Trees in slices: several steps of one request in flight, over a target without a model.

The fake target reads every row's text through its KV cache, so that a slot that is used twice,
moved wrongly or freed too soon fails an assertion there or changes the text.
"""

import asyncio

from draftline.core.request.output import Delta
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes.fake_bench import Bench
from support.fakes.fake_target import plain_answer

VOCAB = 7

requests = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), st.integers(1, 40)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=80)
@given(
    requests,
    st.integers(0, 2**31),
    st.integers(2, 9),
    st.integers(1, 12),
    st.integers(24, 120),
    st.booleans(),
)
def test_text_is_that_of_plain_decoding(
    found: list[tuple[list[int], int]],
    seed: int,
    groups: int,
    turns: int,
    num_blocks: int,
    is_adaptive: bool,
) -> None:
    bench = Bench(
        seed=seed, num_groups=groups, most_turns=turns, num_blocks=num_blocks, streaming="on",
        is_adaptive=is_adaptive,
    )  # fmt: skip

    async def scenario() -> None:
        for index, (prompt, max_tokens) in enumerate(found):
            bench.add("r" * (index + 1), prompt, max_tokens)
        await bench.run()

    asyncio.run(scenario())
    for index, (prompt, max_tokens) in enumerate(found):
        name = "r" * (index + 1)
        assert bench.tokens(name) == plain_answer(prompt, max_tokens, len(name), VOCAB)
        last = bench.heard[name][-1]
        assert isinstance(last, Delta)
        assert last.metrics is not None
        assert last.metrics.generated_tokens == max_tokens
    bench.check_empty()
