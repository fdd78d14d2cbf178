"""SPECTRA's dictionaries: caps, order, and guesses by the longest suffix."""

from draftline.drafters.ngram.ngram_dictionaries import ForwardDictionary
from support.inputs.spectra_reference import BackwardDictionary


def test_continuations_come_latest_first_and_once() -> None:
    forward = ForwardDictionary(capacity=3, max_keys=9)
    for continuation in [(1,), (2,), (3,), (1,)]:
        forward.add(7, continuation)
    assert list(forward.continuations(7)) == [(1,), (3,), (2,)]
    assert list(forward.continuations(8)) == []
    assert 7 in forward
    assert 8 not in forward


def test_a_full_key_forgets_its_oldest_continuation() -> None:
    forward = ForwardDictionary(capacity=2, max_keys=9)
    for continuation in [(1,), (2,), (3,)]:
        forward.add(7, continuation)
    assert list(forward.continuations(7)) == [(3,), (2,)]


def test_a_prefix_gives_way_to_what_extends_it() -> None:
    forward = ForwardDictionary(capacity=4, max_keys=9)
    for continuation in [(1,), (1, 2), (1, 2, 3)]:
        forward.add(7, continuation)
    forward.add(7, (5,))
    assert list(forward.continuations(7)) == [(5,), (1, 2, 3)]
    forward.add(7, (1,))
    assert list(forward.continuations(7)) == [(1, 2, 3), (5,)]


def test_the_oldest_keys_are_forgotten() -> None:
    forward = ForwardDictionary(capacity=2, max_keys=2)
    backward = BackwardDictionary(max_keys=2)
    for key in (1, 2, 1, 3):
        forward.add(key, (9,))
        backward.add((key,), 9)
    assert [key in forward for key in (1, 2, 3)] == [True, False, True]
    assert [backward.guess([key], 1, 1) for key in (1, 2, 3)] == [[9], [], [9]]


def test_the_last_writer_wins() -> None:
    backward = BackwardDictionary(max_keys=9)
    backward.add((1,), 2)
    backward.add((1,), 3)
    assert backward.guess([1], key_len=2, guess_len=1) == [3]


def test_a_guess_grows_by_the_longest_known_suffix() -> None:
    backward = BackwardDictionary(max_keys=9)
    backward.add((2,), 8)
    backward.add((1, 2), 3)
    backward.add((3,), 4)
    # 1 2 -> 3 by the pair, then 3 -> 4, then nothing follows 4.
    assert backward.guess([0, 1, 2], key_len=2, guess_len=5) == [3, 4]
    assert backward.guess([0, 2], key_len=2, guess_len=5) == [8]
    assert backward.guess([0, 1, 2], key_len=1, guess_len=5) == [8]
    assert backward.guess([0, 1, 2], key_len=2, guess_len=1) == [3]
