"""Buckets of accepted lengths: what a request's last step tells of its next one.

Texts copy in runs. After a step in which nothing was accepted, n-grams and retrieved texts are
right again for a token or two; after one of many accepted nodes, for many. So drafters are chosen
by it, and heads of the last stage may draft only behind such steps as need them.
"""

from __future__ import annotations

from bisect import bisect_left

# Most accepted nodes of a step in each bucket but the last.
BUCKET_LENGTHS = (0, 3)
NUM_LENGTH_BUCKETS = len(BUCKET_LENGTHS) + 1
# A bit for each bucket.
EVERY_LENGTH_BUCKET = (1 << NUM_LENGTH_BUCKETS) - 1
# Beside them: also where a chunk of a pipelined tree was accepted down to a leaf, behind which
# chunks in flight may go on.
AT_LEAVES = 1 << NUM_LENGTH_BUCKETS


def length_bucket_of(num_accepted: int) -> int:
    """The bucket of a step in which so many nodes were accepted."""
    return bisect_left(BUCKET_LENGTHS, num_accepted)


def is_in(length_buckets: int, num_accepted: int, at_leaf: bool = False) -> bool:
    """Whether a step in which so many nodes were accepted is in one of the buckets, bits.

    num_accepted  -1: nothing is known of them yet
    at_leaf       whether a chunk of a pipelined tree was accepted down to a leaf
    """
    if num_accepted < 0 or (at_leaf and not length_buckets & AT_LEAVES):
        return False
    return bool(length_buckets >> length_bucket_of(num_accepted) & 1)
