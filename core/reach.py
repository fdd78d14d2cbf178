"""How far a request's last step came: what that tells of the next one.

Texts copy in runs. After a step in which nothing was accepted, n-grams and retrieved texts are
right again for a token or two; after one of many accepted nodes, for many. So drafters are chosen
by it, and heads of the last stage may draft only behind such steps as need them.
"""

from __future__ import annotations

from bisect import bisect_left

# Most accepted nodes of a step of each reach but the last.
REACHES = (0, 3)
NUM_REACHES = len(REACHES) + 1
# A bit for each reach.
EVERY_REACH = (1 << NUM_REACHES) - 1
# Beside them: also where a streamed tree's slice was right down to a leaf, behind which others that
# are on their way may go on.
AT_LEAVES = 1 << NUM_REACHES


def reach_of(num_accepted: int) -> int:
    """The reach of a step in which so many nodes were accepted."""
    return bisect_left(REACHES, num_accepted)


def is_in(reaches: int, num_accepted: int, at_leaf: bool = False) -> bool:
    """Whether a step in which so many nodes were accepted is of one of `reaches`, bits.

    num_accepted  -1: nothing is known of them yet
    at_leaf       whether a streamed tree's slice was right down to a leaf
    """
    if num_accepted < 0 or (at_leaf and not reaches & AT_LEAVES):
        return False
    return bool(reaches >> reach_of(num_accepted) & 1)
