"""Muon (Jordan et al. 2024) in float32.

`torch.optim.Muon` runs its Newton-Schulz iteration in bfloat16, which CPUs without native
bfloat16 arithmetic emulate many times slower than float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Quintic coefficients of the Muon reference: fast convergence of singular values into [0.7, 1.2].
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix to `matrix` [rows, cols], approximately, in its dtype."""
    a, b, c = COEFFICIENTS
    x = matrix / (matrix.norm() + 1e-7)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for _ in range(num_iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if transposed else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; for the matrices between embedding and head only."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter from its gradient; parameters without a gradient stay."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalize(param.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
                param.add_(update, alpha=-group["lr"] * scale)
