"""k-sequential selection beside the logits: `core/verify/k_seq.py` in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.candidates import Verdict
from ...core.types import ROOT
from ...core.verify.k_seq import HALVINGS
from ...core.verify.rng import SeededChance
from ...core.verify.verification import TreeCandidates
from .candidates import CandidateLaws, draw_one, normalised


def verify_k_seq(laws: Tensor, tree: TreeCandidates, chance: SeededChance) -> Verdict:
    """What the rule decides about a tree; laws float64 [nodes + 1, vocabulary]."""
    drawn = CandidateLaws.of(tree, laws.device)
    nodes, tokens = tree.nodes.tolist(), torch.from_numpy(tree.tokens).to(laws.device).long()
    path: list[int] = []
    node = ROOT
    while len(places := (tree.parents == node).nonzero()[0]):
        law = laws[node + 1]
        # Those of one node are draws of one law.
        own = drawn.whole(slice(places[0], places[0] + 1), len(law))[0]
        rho, residual = _selection(law, own, len(places))
        chosen = tokens[torch.from_numpy(places).to(tokens.device)]
        chances = (law[chosen] / (rho * own[chosen])).clamp(max=1.0).tolist()
        for place, probability in zip(places.tolist(), chances, strict=True):
            if chance.accepts(probability):
                node = nodes[place]
                path.append(node)
                break
        else:
            return Verdict(path, draw_one(residual, chance.coin()))
    return Verdict(path, draw_one(laws[node + 1], chance.coin()))


def _selection(law: Tensor, drawn: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """rho, and the law that is left if all candidates fail."""
    low, rho = law.new_ones(()), law.new_full((), count)
    for _ in range(HALVINGS):
        middle = (low + rho) / 2
        beta = torch.minimum(drawn, law / middle).sum()
        is_enough = 1.0 - (1.0 - beta) ** count <= middle * beta
        low, rho = torch.where(is_enough, low, middle), torch.where(is_enough, middle, rho)
    shared = torch.minimum(drawn, law / rho)
    share = shared.sum()
    taken = torch.where(share > 0, shared * (1.0 - (1.0 - share) ** count) / share, 0.0)
    return rho, normalised((law - taken).clamp(min=0.0), law)
