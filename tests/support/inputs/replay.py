"""Replays a recorded text against a drafter: how many tokens a step would have committed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from draftline.core.arrays import ROOT, Int32
from draftline.core.drafter import Drafter
from draftline.core.proposals import Commit, DraftRequest, Proposal, Query


@dataclass(frozen=True, slots=True)
class Replay:
    """Steps that were taken, tokens that they committed, nodes that they verified."""

    steps: int
    committed: int
    nodes: int

    @property
    def tau(self) -> float:
        return self.committed / self.steps


def replay(drafter: Drafter, text: Int32, prompt_len: int, max_nodes: int) -> Replay:
    """What a target that says `text` would commit; sampling is greedy and probes are dropped."""
    drafter.open(DraftRequest("replay", text[:prompt_len], prompt_len, temperature=0.0, seed=0))
    done, steps, nodes = prompt_len, 0, 0
    while done < len(text):
        [proposal] = drafter.propose([Query("replay", done, max_nodes)])
        accepted = min(matching_prefix(proposal, text[done:]), len(text) - done - 1)
        tokens = text[done : done + accepted + 1]
        drafter.observe([Commit("replay", done, tokens)])
        done, steps, nodes = done + len(tokens), steps + 1, nodes + len(proposal.tokens)
    drafter.close("replay")
    return Replay(steps, done - prompt_len, nodes)


def matching_prefix(proposal: Proposal, text: Int32) -> int:
    """Length of the longest path from the root that spells the text's first tokens."""
    edges = zip(proposal.parents.tolist(), proposal.tokens.tolist(), strict=True)
    children = {edge: node for node, edge in enumerate(edges)}
    node: int | None = ROOT
    for matched, token in enumerate(text.tolist()):
        node = children.get((node, token))
        if node is None:
            return matched
    return len(text)


def byte_tokens(text: str) -> Int32:
    """The UTF-8 bytes of a text as token ids 0 to 255."""
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
