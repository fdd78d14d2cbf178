"""The Muon optimizer: momentum, orthogonalised before each update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Coefficients of the odd polynomial x -> a x + b x^3 + c x^5 that each iteration applies to the
# singular values: Polar Express (arXiv:2505.16932), the first four of its schedule.
POLYNOMIALS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
)


class Muon(torch.optim.Optimizer):
    """Muon (Keller Jordan, 2024) in float32, all matrices of one shape in one batched product.

    torch's own version casts to bfloat16, which is many times slower on CPUs without bfloat16
    units.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": 0.95, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move every matrix against its orthogonalised momentum (Nesterov)."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                update = orthogonalize(torch.stack([self._push(m, group) for m in matrices]))
                # A scale for tall matrices: orthonormal columns change the output less than a
                # square matrix does.
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for matrix, delta in zip(matrices, update, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(delta, alpha=-scale)

    def _push(self, matrix: nn.Parameter, group: dict[str, float]) -> Tensor:
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum = state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
        return matrix.grad.lerp(momentum, group["momentum"])


def orthogonalize(matrices: Tensor) -> Tensor:
    """Matrices [count, rows, columns] with about the same singular vectors, all values near 1."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in POLYNOMIALS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
