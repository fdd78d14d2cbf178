"""A tree in a layer that keeps a state: by its recurrence, and as one system of equations.

    python -m draftline.benchmarks.step.recurrence

Milliseconds on one thread of a CPU, of a gated delta layer of Qwen3-Next: 32 heads of 128 x 128, 16
heads of keys, 2,048 wide. Beside them the layer's own projections. The trees are random, of
branches that go on from one of the last six nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ...core.tree.tree import pack, unpack
from ...kernels.recurrence.tree_form import Columns, solve_tree
from ...kernels.recurrence.walk import walk
from ...models.recurrence.step_plan import plan_tree

HIDDEN, KEY_HEADS, HEADS, DIM = 2048, 16, 32, 128
NODES = (1, 16, 64)
ROUNDS = 9


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    table = Table("nodes", "recurrence, ms", "one system, ms", "projections, ms",
                  box=None, pad_edge=False)  # fmt: skip
    for count in NODES:
        table.add_row(str(count), *(f"{1e3 * seconds:.1f}" for seconds in _measure(count)))
    Console(width=110, highlight=False).print(table)


@torch.inference_mode()
def _measure(count: int) -> tuple[float, float, float]:
    random = np.random.default_rng(count)
    torch.manual_seed(count)
    parents = [
        int(random.integers(max(0, node - 6), node)) if node else -1 for node in range(count)
    ]
    sees = np.eye(count, dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    keys, queries = (torch.randn(count, KEY_HEADS, DIM) / DIM**0.5 for _ in range(2))
    values, rates = torch.randn(count, HEADS, DIM), torch.rand(count, HEADS)
    decays, states = -torch.rand(count, HEADS, 1), torch.randn(1, HEADS, DIM, DIM)
    ancestors = pack(sees)
    places = np.arange(count, dtype=np.int64)
    positions = sees.sum(axis=1).astype(np.int32)
    order, _, _, num_buffers = plan_tree(ancestors, positions, places, places[:0], 0, -1, 0)
    buffers = np.empty((num_buffers, DIM, DIM), dtype=np.float32)
    deltas, outputs = torch.empty_like(values), torch.empty_like(values)
    kept = keys.numpy(), decays.numpy(), deltas.numpy()
    own = values.numpy(), rates.numpy(), queries.numpy(), outputs.numpy()
    columns = Columns(keys, decays, values[:0], torch.from_numpy(unpack(ancestors, count)))
    rows, inner = torch.randn(count, HIDDEN), torch.randn(count, HEADS * DIM)
    width = 2 * (KEY_HEADS + HEADS) * DIM
    before, behind = torch.randn(width, HIDDEN), torch.randn(HIDDEN, HEADS * DIM)

    def project() -> tuple[Tensor, Tensor]:
        return rows @ before.t(), inner @ behind.t()

    return (
        _best(lambda: walk(states.numpy(), buffers, *kept, *own, order, True)),
        _best(lambda: solve_tree(states[0], columns, values, rates, queries, corrects=True)),
        _best(project),
    )


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest round; the first compiles."""
    work()
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


if __name__ == "__main__":
    typer.run(main)
