from __future__ import annotations

import random

from draftline.cluster.links.failures import CircuitBreaker, RetryPolicy


def test_delays_double_from_the_first_untolerated_failure_with_jitter():
    policy = RetryPolicy(tolerated=2, first_delay_s=1.0, max_delay_s=6.0)
    breaker = CircuitBreaker(policy, random.Random(1))
    delays = [breaker.fail(100.0) for _ in range(7)]
    assert delays[:2] == [0.0, 0.0]
    for delay, longest in zip(delays[2:], (1.0, 2.0, 4.0, 6.0, 6.0), strict=True):
        assert longest / 2 <= delay <= longest
    assert breaker.retry_at == 100.0 + delays[-1]


def test_two_breakers_do_not_return_together():
    policy = RetryPolicy(tolerated=0)
    rng = random.Random(1)
    assert CircuitBreaker(policy, rng).fail(0.0) != CircuitBreaker(policy, rng).fail(0.0)


def test_a_good_answer_resets_it():
    breaker = CircuitBreaker(RetryPolicy(tolerated=1), random.Random(1))
    breaker.fail(0.0)
    breaker.succeed()
    assert breaker.fail(0.0) == 0.0


def test_a_thousand_failures_do_not_overflow():
    breaker = CircuitBreaker(RetryPolicy(max_delay_s=5.0), random.Random(1))
    assert max(breaker.fail(0.0) for _ in range(2000)) <= 5.0
