"""Applies an acceptance rule beside the logits, on the last stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..core.acceptance_rules import RULES
from ..core.candidates import Verdict
from ..core.seeded_chance import SeededChance
from ..core.types import Float64, Int32, SamplingRows
from ..core.verification import Verification, children_of
from .rejection import verify_rejections
from .sampler import process_rows


def verdicts(
    logits: Tensor, sampling: SamplingRows, verification: Verification
) -> tuple[Verdict, ...]:
    """What is accepted of each tree, and the token after it.

    logits  float32 [rows, vocabulary], edited; rows of trees come first, each root's before those
            of its nodes, as in `sampling`
    """
    num_rows = sum(1 + tree.num_nodes for tree in verification.trees)
    laws = target_laws(logits[:num_rows], sampling)
    if all(tree.rule == "rejection" for tree in verification.trees):
        return verify_rejections(laws, verification)
    return _one_by_one(laws.cpu().numpy(), verification)


def _one_by_one(laws: Float64, verification: Verification) -> tuple[Verdict, ...]:
    found, first = [], 0
    parts = zip(verification.trees, verification.seeds, verification.positions, strict=True)
    for tree, seed, position in parts:
        own = laws[first : first + 1 + tree.num_nodes]
        children = children_of(tree, own.shape[1])
        found.append(RULES[tree.rule](own, children, SeededChance(seed, position)))
        first += 1 + tree.num_nodes
    return tuple(found)


def with_verdicts(targets: Int32, verification: Verification, found: Sequence[Verdict]) -> Int32:
    """int32 [rows]: `targets` with the tokens that were committed after the rows of each path."""
    targets = targets.copy()
    first = 0
    for tree, (path, token) in zip(verification.trees, found, strict=True):
        tokens = dict(zip(tree.nodes.tolist(), tree.tokens.tolist(), strict=True))
        rows = [0, *(node + 1 for node in path)]
        targets[[first + row for row in rows]] = [*(tokens[node] for node in path), token]
        first += 1 + tree.num_nodes
    return targets


def target_laws(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """float64 [rows, vocabulary]: the law that each row's token is drawn from."""
    laws = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    laws.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    sampled = np.flatnonzero(sampling.temperature[: len(logits)])
    if len(sampled):
        rows = torch.from_numpy(sampled).to(logits.device)
        scaled = process_rows(logits[rows].float(), sampling, sampled)
        laws[rows] = torch.softmax(scaled.double(), dim=-1)
    return laws
