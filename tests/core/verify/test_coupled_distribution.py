"""Coupled sampling follows the target's distribution, with trees or without (chi-square)."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from draftline.core.arrays import Int32
from draftline.core.sampling import choose_tokens
from draftline.core.steps import StepInput
from scipy.stats import chisquare
from support.fakes.fake_bench import Bench
from support.fakes.fake_target import FakeTarget

VOCAB = 4
NUM_TOKENS = 3
NUM_REQUESTS = 3000
# A correct sampler fails a test with this probability; the seeds are fixed, so it fails never or
# always.
ERROR_RATE = 1e-4
LOGITS = np.random.default_rng(5).normal(scale=1.2, size=(VOCAB, VOCAB)).astype(np.float32)


class MarkovTarget(FakeTarget):
    """The distribution of the next token depends on the last one; tokens are drawn as stages draw
    them.
    """

    def choose(self, step: StepInput, texts: list[list[int]]) -> Int32:
        rows = [LOGITS[text[-1]] for text in texts]
        return choose_tokens(np.array(rows).reshape(-1, VOCAB), step.sampling)


def distribution(temperature: float) -> np.ndarray:
    """P(token 1, token 2, token 3) after the prompt [0], flattened."""
    scaled = np.exp(LOGITS.astype(np.float64) / temperature)
    step = scaled / scaled.sum(axis=1, keepdims=True)
    return np.einsum("a,ab,bc->abc", step[0], step, step).ravel()


def frequencies(temperature: float, speculative: bool) -> np.ndarray:
    bench = Bench(
        num_blocks=4096, rows=512, nodes=6, max_running=64, max_waiting=NUM_REQUESTS, vocab=VOCAB
    )
    bench.use_target(MarkovTarget(VOCAB, bench.block_size))
    for index in range(NUM_REQUESTS):
        name = f"r{index}"
        bench.add(name, [0], NUM_TOKENS, speculative, temperature=temperature, seed=index)
    asyncio.run(bench.run())
    counts = Counter(tuple(bench.tokens(f"r{index}")) for index in range(NUM_REQUESTS))
    shape = (VOCAB,) * NUM_TOKENS
    return np.array([counts[cell] for cell in np.ndindex(*shape)])


@pytest.mark.parametrize(("temperature", "speculative"), [(0.7, True), (1.0, True), (1.0, False)])
def test_the_distribution_of_three_tokens_is_the_targets(
    temperature: float, speculative: bool
) -> None:
    found = frequencies(temperature, speculative)
    assert chisquare(found, distribution(temperature) * NUM_REQUESTS).pvalue > ERROR_RATE


def test_the_test_notices_a_wrong_distribution() -> None:
    found = frequencies(1.0, speculative=True)
    assert chisquare(found, distribution(1.2) * NUM_REQUESTS).pvalue < ERROR_RATE
