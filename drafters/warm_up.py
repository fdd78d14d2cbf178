"""Compiles the loops of a drafter, or loads them, so that no step waits for it."""

from __future__ import annotations

import numpy as np

from ..core.interfaces import Drafter
from ..core.proposals import Commit, DraftRequest, Query

REQUEST_ID = "warm-up"


def warm_up(drafter: Drafter) -> None:
    """Take a drafter through the life of a short request. Discard the drafter afterwards."""
    text = np.array([1, 2, 3, 1, 2, 3, 1, 2], dtype=np.int32)
    drafter.open(DraftRequest(REQUEST_ID, text, len(text), temperature=0.0, seed=0))
    length = len(text)
    for token in (3, 1):
        drafter.propose([Query(REQUEST_ID, length, 4)])
        drafter.observe([Commit(REQUEST_ID, length, np.array([token], dtype=np.int32))])
        length += 1
    drafter.propose([Query(REQUEST_ID, length, 4)])
    drafter.close(REQUEST_ID)
    # What ended requests said is looked at, too.
    drafter.open(DraftRequest("again", text, len(text), temperature=0.0, seed=0))
    drafter.propose([Query("again", len(text), 4)])
