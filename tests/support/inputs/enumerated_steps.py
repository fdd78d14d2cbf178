"""What a step commits, on every branch of what drafters draw and of what a rule decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from draftline.core.proposals import Proposal
from draftline.core.tree.merge import merge
from draftline.core.tree.tree import TokenTree
from draftline.core.verify.rules import candidates_of

from .enumeration import Distributions, Text
from .plain_rules import RULES, Rng, children_of

MAX_DEPTH = 2
Propose = Callable[[Rng], Proposal]


def texts_of(tree: TokenTree) -> list[Text]:
    """What stands behind the root and each node, the root's first."""
    texts: list[Text] = [()]
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        texts.append((*texts[parent + 1], token))
    return texts


def committed(
    target: Distributions,
    drafters: Sequence[Propose],
    max_nodes: int,
    rule: str,
    *,
    room: int | None = None,
    max_depth: int = MAX_DEPTH,
) -> Callable[[Rng], Text]:
    """A step with a tree of at most so many nodes; `room` tells the candidates of another limit
    than the tree's."""
    vocab = len(target[()])

    def run(rng: Rng) -> Text:
        proposals = [propose(rng) for propose in drafters]
        tree = merge(proposals, max_nodes, max_depth)
        candidates = candidates_of(rule, tree, proposals, max_nodes if room is None else room)
        texts = texts_of(tree)
        table = np.array([target[text] for text in texts])
        path, token = RULES[rule](table, children_of(candidates, vocab), rng)
        return (*(texts[path[-1] + 1] if path else ()), token)

    return run
