"""The window of SPECTRA and Lookahead against the example of docs/drafters.md."""

import numpy as np
import pytest
from draftline.drafters.ngram.lookahead import CandidatePool


def pool_of(ngram: int, window: int) -> CandidatePool:
    prompt = np.arange(5, dtype=np.int32)
    return CandidatePool(ngram, window, prompt, np.random.default_rng(0))


def steady_pool() -> CandidatePool:
    """N=4, W=3 with level 0 = a1 a2, level 1 = b0 b1 b2, level 2 = c0 c1 c2."""
    pool = pool_of(4, 3)
    pool._levels = [[1, 2], [10, 11, 12], [20, 21, 22]]
    return pool


def test_steady_layout() -> None:
    probe = steady_pool().probe(top_k=2)
    assert probe.tokens.tolist() == [1, 2, 10, 11, 12, 20, 21, 22]
    assert probe.offsets.tolist() == [1, 2, 1, 2, 3, 2, 3, 4]
    assert probe.wanted.tolist() == [5, 6, 7]
    assert probe.top_k == 2
    seen = [set(probe.tokens[row].tolist()) for row in probe.mask]
    assert seen == [
        {1},
        {1, 2},
        {10},
        {1, 11},
        {1, 2, 12},
        {10, 20},
        {1, 11, 21},
        {1, 2, 12, 22},
    ]


def test_steady_step_completes_ngrams_and_shifts_by_one() -> None:
    pool = steady_pool()
    ngrams = pool.advance(root=9, predicted=[30, 31, 32])
    assert ngrams == [(9, 10, 20, 30), (1, 11, 21, 31), (2, 12, 22, 32)]
    assert pool._levels == [[11, 12], [20, 21, 22], [30, 31, 32]]
    probe = pool.probe(top_k=1)
    assert probe.tokens.tolist() == [11, 12, 20, 21, 22, 30, 31, 32]


def test_warm_up_adds_a_level_and_drops_a_column_at_each_step() -> None:
    pool = pool_of(4, 3)
    assert [len(level) for level in pool._levels] == [4]
    [first] = pool._levels
    assert pool.probe(1).wanted.tolist() == [0, 1, 2, 3]
    assert pool.advance(9, [50, 51, 52, 53]) == []
    assert pool._levels == [first[1:], [50, 51, 52, 53]]
    assert pool.probe(1).wanted.tolist() == [3, 4, 5, 6]
    assert pool.advance(9, [60, 61, 62, 63]) == []
    assert pool._levels == [first[2:], [51, 52, 53], [61, 62, 63]]
    assert pool.probe(1).wanted.tolist() == [5, 6, 7]


@pytest.mark.parametrize("ngram", [3, 4, 6])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_every_size_reaches_its_steady_state_and_stays(ngram: int, window: int) -> None:
    pool = pool_of(ngram, window)
    for step in range(2 * ngram):
        probe = pool.probe(1)
        assert np.all(probe.mask.diagonal())
        assert not np.any(probe.mask[probe.offsets[:, None] < probe.offsets])
        assert probe.offsets.min() == 1
        ngrams = pool.advance(0, list(range(len(probe.wanted))))
        warm = step >= ngram - 2
        assert [len(one) for one in ngrams] == [ngram] * window * warm
    assert len(pool.probe(1).tokens) == (ngram - 1) * window - 1


def test_a_row_sees_one_token_of_each_position_before_its_own() -> None:
    """So that the target reads a gapless text: offsets 1, 2, ... up to the row's own."""
    for pool in (steady_pool(), pool_of(5, 4)):
        probe = pool.probe(1)
        for row, own in zip(probe.mask, probe.offsets.tolist(), strict=True):
            assert sorted(probe.offsets[row].tolist()) == list(range(1, own + 1))
