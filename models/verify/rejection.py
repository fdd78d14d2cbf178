"""Sequential residual verification of all trees of a step.

Candidates are tested one by one, each with its own distribution. One rule for Leviathan's and
Chen's chains, SPECTRA's greedy and sample verification, SpecInfer's multi-step sampling and
Sequoia's draws without replacement. See docs/how-it-works.md, "Rejection".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Float64
from ...core.steps import Verification, VerificationResult
from ...core.verify.rules import SeededRng
from .candidates import CandidateDistributions, cut_distributions, draw, normalised


def verify_rejections(
    distributions: Tensor, verification: Verification
) -> tuple[VerificationResult, ...]:
    """A path and a token of each tree, with exactly the target's distribution.

    A candidate is accepted with min(1, r(x) / q(x)); r begins as p and loses q with each refusal.

    distributions  float64 [rows, vocabulary]: of each tree's root and nodes, tree by tree; stays
                   unchanged

    Every iteration tests the next candidate of every tree that has one.
    """
    batch = _Batch.of(verification, distributions.device)
    row, next_test = batch.roots.clone(), batch.first_test[batch.roots].clone()
    left = distributions[row]
    num_uniforms = torch.zeros_like(row)
    accepted_rows: list[Tensor] = []
    while (has_test := next_test < batch.end_test[row]).any():
        test = torch.where(has_test, next_test, 0)
        drawn = batch.distributions.whole(test, distributions.shape[1])
        token = batch.tokens[test][:, None]
        ratio = (left.gather(1, token) / drawn.gather(1, token))[:, 0]
        uniform = batch.uniforms.gather(1, num_uniforms[:, None])[:, 0]
        is_accepted = has_test & (uniform < ratio)
        left = torch.where((has_test & ~is_accepted)[:, None], _residual(left, drawn), left)
        row = torch.where(is_accepted, batch.child_rows[test], row)
        left = torch.where(is_accepted[:, None], distributions[row], left)
        next_test = torch.where(is_accepted, batch.first_test[row], next_test + has_test)
        num_uniforms += has_test
        accepted_rows.append(torch.where(is_accepted, row, -1))
    uniform = batch.uniforms.gather(1, num_uniforms[:, None])
    return batch.verification_results(accepted_rows, draw(left, uniform))


def _residual(left: Tensor, drawn: Tensor) -> Tensor:
    """norm(max(left - q, 0)); where rounding left no mass at all, `left`."""
    return normalised((left - drawn).clamp(min=0.0), left)


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """All candidates, those that follow one row side by side in the order of their tests.

    roots                 int64 [trees]  each root's row
    first_test, end_test  int64 [rows]   which candidates follow a row
    tokens, child_rows    int64 [candidates]
    distributions         of the candidates
    uniforms              float64 [trees, tests + 1]: the last one draws the token
    """

    roots: Tensor
    first_test: Tensor
    end_test: Tensor
    tokens: Tensor
    child_rows: Tensor
    distributions: CandidateDistributions
    uniforms: Tensor

    @classmethod
    def of(cls, verification: Verification, device: torch.device) -> _Batch:
        """The candidates of all trees of a step, on `device`."""
        trees = verification.trees
        sizes = np.array([1 + tree.num_nodes for tree in trees])
        roots = np.cumsum(sizes) - sizes
        parents = np.concatenate([t.parents + 1 + r for t, r in zip(trees, roots, strict=True)])
        order = np.argsort(parents, kind="stable")
        counts = np.bincount(parents, minlength=int(sizes.sum()))
        children = np.concatenate([t.nodes + 1 + r for t, r in zip(trees, roots, strict=True)])
        tokens = np.concatenate([tree.tokens for tree in trees])
        ids, probs = cut_distributions(trees)
        arrays: dict[str, np.ndarray] = {
            "roots": roots,
            "first_test": np.cumsum(counts) - counts,
            "end_test": np.cumsum(counts),
            "tokens": tokens[order],
            "child_rows": children[order],
        }
        on_device = {
            name: torch.from_numpy(array.astype(np.int64)).to(device)
            for name, array in arrays.items()
        }
        return cls(
            **on_device,
            distributions=CandidateDistributions(
                torch.from_numpy(ids[order]).to(device), torch.from_numpy(probs[order]).to(device)
            ),
            uniforms=torch.from_numpy(_uniforms(verification)).to(device),
        )

    def verification_results(
        self, accepted_rows: Sequence[Tensor], tokens: Tensor
    ) -> tuple[VerificationResult, ...]:
        """The results tree by tree, from each iteration's accepted rows, -1 where there was
        none."""
        roots = self.roots.tolist()
        paths: list[list[int]] = [[] for _ in roots]
        for rows in accepted_rows:
            for path, row, root in zip(paths, rows.tolist(), roots, strict=True):
                if row >= 0:
                    path.append(row - root - 1)
        return tuple(map(VerificationResult, paths, tokens.tolist()))


def _uniforms(verification: Verification) -> Float64:
    most = max(len(tree.tokens) for tree in verification.trees) + 1
    pairs = zip(verification.seeds, verification.positions, strict=True)
    return np.stack([SeededRng(*pair).uniforms(most) for pair in pairs])
