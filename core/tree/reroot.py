"""Makes a proposal for an older text fit the text that was committed since.

See docs/algorithms/token_trees.md, "Re-rooting".
"""

from __future__ import annotations

import numpy as np

from ..arrays import ROOT, Int32
from ..proposals import Proposal


def reroot(proposal: Proposal, tokens: Int32) -> Proposal | None:
    """What is left of a proposal after `tokens` int32 [k] were committed to its base text.

    The nodes below the paths that spell `tokens`, in their order; where siblings repeat a token,
    the nodes below each of them. None where nothing is left. The probe goes: its rows and
    positions belong to the old root; `num_top_next_tokens`, which is about any tree, stays. With
    k = 0 the proposal itself.
    """
    if len(tokens) == 0:
        return proposal
    path = tokens.tolist()
    # Tokens of the path that a node's own path spells; -1 once it left the path.
    matched: list[int] = []
    new_index: list[int] = []
    kept: list[int] = []
    parents: list[int] = []
    for node, (token, parent) in enumerate(
        zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True)
    ):
        depth = 0 if parent == ROOT else matched[parent]
        new_parent = ROOT if parent == ROOT else new_index[parent]
        is_kept = depth == len(path)
        is_on_path = 0 <= depth < len(path) and path[depth] == token
        matched.append(depth if is_kept else depth + 1 if is_on_path else -1)
        new_index.append(len(kept) if is_kept else ROOT)
        if is_kept:
            kept.append(node)
            parents.append(new_parent)
    if not kept and not proposal.num_top_next_tokens:
        return None
    return Proposal(
        proposal.source,
        proposal.tokens[kept],
        np.array(parents, dtype=np.int32),
        proposal.log_probs[kept],
        num_top_next_tokens=proposal.num_top_next_tokens,
        distributions=None if proposal.distributions is None else proposal.distributions.rows(kept),
    )
