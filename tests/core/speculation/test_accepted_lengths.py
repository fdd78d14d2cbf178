"""What drafters gained: in a step, and in those behind it."""

from __future__ import annotations

import numpy as np
import pytest
from draftline.core.speculation.accepted_lengths import (
    LATER_DISCOUNT,
    AcceptedLengths,
    AskedStep,
    margin,
    record_lengths,
)
from draftline.core.steps import NUM_LENGTH_BUCKETS

RNG = np.random.default_rng(0)


def record(
    known: AcceptedLengths, bucket: int, lengths: list[int], *, like_others: bool = True
) -> None:
    """A step of one request that asked all drafters, each at the price of a tenth of a token."""
    newest = AskedStep(
        buckets=np.array([bucket]),
        asked=np.array([(1 << len(lengths)) - 1]),
        lengths=np.array([lengths]),
        accepted=np.array([max(lengths)]),
        sizes=np.array([4]),
        is_like_others=np.array([like_others]),
    )
    seconds = np.tile([0.0, 0.1, 0.0], (len(lengths), 1))
    record_lengths(known, newest, seconds, 0.0, 1.0)


def walk(known: AcceptedLengths, num_steps: int, stays: float) -> None:
    """Steps of which those behind an accepted one accept two tokens with probability `stays`, and
    the others with 0.1."""
    bucket = 0
    for _ in range(num_steps):
        length = 2 * int(RNG.random() < (stays if bucket else 0.1))
        record(known, bucket, [length])
        bucket = 1 if length else 0


def test_a_bucket_is_worth_what_is_accepted_behind_it() -> None:
    known = AcceptedLengths.none(NUM_LENGTH_BUCKETS, 1)
    walk(known, 4000, 0.8)
    known.value_buckets()
    # later = 2 * (0.8 - 0.1) + LATER_DISCOUNT * (0.8 - 0.1) * later
    assert known.later[1] == pytest.approx(1.4 / (1 - 0.7 * LATER_DISCOUNT), rel=0.35)
    assert known.later[2] >= known.later[1] > known.later[0] == 0.0
    own = margin(known, 0, 0, 0, 0.0)
    assert own == pytest.approx(0.2, abs=0.1)
    assert margin(known, 0, 0, 0, 1.0) == pytest.approx(own * (1 + known.later[1] / 2))


def test_a_bucket_that_is_never_left_has_a_finite_value() -> None:
    known = AcceptedLengths.none(NUM_LENGTH_BUCKETS, 1)
    for _ in range(20_000):
        record(known, 2, [6])
    known.value_buckets()
    assert 0 < known.later[2] <= 6 / (1 - LATER_DISCOUNT)


def test_where_buckets_tell_nothing_no_later_token_counts() -> None:
    known = AcceptedLengths.none(NUM_LENGTH_BUCKETS, 1)
    walk(known, 4000, 0.1)
    known.value_buckets()
    assert known.later[1] < 0.3


def test_a_drafter_adds_what_is_beyond_the_others() -> None:
    known = AcceptedLengths.none(NUM_LENGTH_BUCKETS, 2)
    for _ in range(99):
        record(known, 0, [1, 3])
    assert margin(known, 0, 0, 0, 1.0) == pytest.approx(0.99)
    assert margin(known, 0, 1, 1, 1.0) == pytest.approx(1.98)
    assert margin(known, 0, 0, 2, 1.0) == 0.0


def test_requests_unlike_others_do_not_tell_where_steps_lead() -> None:
    known = AcceptedLengths.none(NUM_LENGTH_BUCKETS, 1)
    for _ in range(50):
        record(known, 0, [0], like_others=False)
        record(known, 1, [2])
        record(known, 0, [2])
    known.value_buckets()
    assert known.later[1] < 0.5


def test_what_was_known_stays_where_drafters_join() -> None:
    known = AcceptedLengths.none(NUM_LENGTH_BUCKETS, 1)
    walk(known, 200, 0.8)
    known.value_buckets()
    wider = known.with_room(2)
    assert margin(wider, 0, 0, 0, 1.0) == margin(known, 0, 0, 0, 1.0)
    record(wider, 1, [2, 4])
    assert margin(wider, 1, 1, 1, 1.0) > 0.0


def test_what_asking_takes_and_how_many_nodes_a_token_takes_are_followed() -> None:
    known = AcceptedLengths.none(2 * NUM_LENGTH_BUCKETS, 1)
    for _ in range(200):
        record(known, NUM_LENGTH_BUCKETS, [2])
    assert known.taken[NUM_LENGTH_BUCKETS, 0].tolist() == pytest.approx([0.0, 0.1])
    assert known.num_nodes.tolist() == pytest.approx([1.0, 2.0], rel=0.01)
