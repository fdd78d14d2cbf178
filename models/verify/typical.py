"""Typical acceptance beside the logits: `core/verify/typical.py` in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.candidates import Verdict
from ...core.verify.rng import SeededChance
from ...core.verify.typical import LEAST, least_likelihood, longest_path
from ...core.verify.verification import TreeCandidates
from .candidates import draw_one


def verify_typical(laws: Tensor, tree: TreeCandidates, chance: SeededChance) -> Verdict:
    """What the rule decides about a tree; laws float64 [nodes + 1, vocabulary]."""
    entropies = -(laws * torch.log(laws + LEAST)).sum(dim=1)
    parents = torch.from_numpy(tree.parents).to(laws.device).long() + 1
    tokens = torch.from_numpy(tree.tokens).to(laws.device).long()
    likely: list[list[tuple[int, float]]] = [[] for _ in range(len(laws))]
    least = [least_likelihood(entropy) for entropy in entropies.tolist()]
    found = laws[parents, tokens].tolist()
    for parent, node, probability in zip(
        tree.parents.tolist(), tree.nodes.tolist(), found, strict=True
    ):
        if probability > least[parent + 1]:
            likely[parent + 1].append((node, probability))
    path = longest_path(likely)
    return Verdict(path, draw_one(laws[path[-1] + 1 if path else 0], chance.coin()))
