"""Trees by their tokens and parents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from draftline.core.proposals import Proposal
from draftline.core.tree.merge import merge
from draftline.core.tree.tree import TokenTree


def tree_of(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    log_probs = np.zeros(len(tokens), dtype=np.float32)
    ids, above = np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32)
    return merge([Proposal("any", ids, above, log_probs)], 99, 99)
