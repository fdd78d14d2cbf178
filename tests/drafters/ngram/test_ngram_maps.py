"""Maps from n-grams to numbers against a dict that keeps the order of use."""

import numpy as np
from draftline.core.arrays import Int32
from draftline.drafters.ngram.ngram_maps import (
    NONE,
    ORDER_LEN,
    VACANT,
    NgramMap,
    add,
    drop_oldest,
    empty_map,
    fill_table,
    find,
    hash_of,
    use,
)
from hypothesis import given
from hypothesis import strategies as st

LONGEST = 3
ngrams = st.lists(st.integers(0, 3), min_size=1, max_size=LONGEST).map(tuple)


def ids(ngram: tuple[int, ...]) -> Int32:
    return np.array(ngram, dtype=np.int32)


def new_map(max_keys: int) -> NgramMap:
    entries, table, queue = empty_map(LONGEST, 1, max_keys, max_keys)
    order = np.zeros(ORDER_LEN, dtype=np.int64)
    order[VACANT] = NONE
    found = (entries, table, order, queue)
    fill_table(found)
    return found


@given(st.lists(ngrams, max_size=60), st.integers(1, 6))
def test_the_one_that_was_used_longest_ago_is_forgotten(
    used: list[tuple[int, ...]], max_keys: int
) -> None:
    found, known = new_map(max_keys), dict[tuple[int, ...], int]()
    for value, ngram in enumerate(used):
        entry = find(found, ids(ngram))
        assert (entry == NONE) == (ngram not in known)
        if entry == NONE:
            if len(known) == max_keys:
                drop_oldest(found)
                del known[next(iter(known))]
            entry = add(found, ids(ngram), hash_of(ids(ngram)))
        else:
            use(found, entry)
        found[0][entry, -1] = value
        known.pop(ngram, None)
        known[ngram] = value
        for other in [*used[: value + 1]]:
            entry = find(found, ids(other))
            assert (None if entry == NONE else found[0][entry, -1]) == known.get(other)


def test_a_longer_ngram_is_another_one() -> None:
    found = new_map(4)
    add(found, ids((1, 2)), hash_of(ids((1, 2))))
    assert find(found, ids((1, 2))) == 0
    assert find(found, ids((1, 2, 3))) == NONE
    assert find(found, ids((2, 1))) == NONE
