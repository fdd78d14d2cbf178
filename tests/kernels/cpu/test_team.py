"""Loops that several threads share: all of each, in any thread, while others do the same."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from draftline.kernels.cpu.build import vectors
from draftline.kernels.cpu.packed_linear import pack_weights, packed_linear
from support.tools.cpu_kernels import load_cpu_kernels

pytestmark = pytest.mark.compiler

HERE = Path(__file__).parent
# Of one part, of a few, and of more than threads take at once.
OUTPUTS = (64, 700, 9000)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


def is_right(rows: int, inputs: int, outputs: int) -> bool:
    """A product whose sums are whole numbers, and so the same in any order."""
    weight = torch.arange(inputs * outputs).reshape(inputs, outputs) % 3.0
    packed = pack_weights([weight], vectors().panel)
    found = packed_linear(torch.ones(rows, inputs), packed, outputs)
    return bool((found == weight.sum(dim=0)).all())


def products(thread: int, threads: int, count: int) -> int:
    """How many of so many products are right, computed here by so many threads."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(thread)
    right = 0
    for outputs in OUTPUTS:
        x = torch.randint(-8, 8, (3, 130), generator=generator).float()
        weight = torch.randint(-8, 8, (130, outputs), generator=generator).float()
        packed = pack_weights([weight], vectors().panel)
        # Sums of whole numbers are exact in any order.
        expected = x @ weight
        for _ in range(count):
            right += torch.equal(packed_linear(x, packed, outputs), expected)
    return right


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_with_helpers_do_not_mix(threads: int) -> None:
    count = 300
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda thread: products(thread, threads, count), range(4)))
    finally:
        torch.set_num_threads(1)
    assert found == [count * len(OUTPUTS)] * 4


def test_the_number_of_threads_may_change() -> None:
    try:
        assert [products(0, threads, 20) for threads in (2, 3, 1, 4)] == [60] * 4
    finally:
        torch.set_num_threads(1)


# Torch's own threads do not outlive a fork: nothing here is large enough for them.
FORKED = """
import os
import sys
import torch
from test_team import is_right, load_cpu_kernels
load_cpu_kernels()
torch.set_num_threads(3)
assert is_right(60, 100, 200)
child = os.fork()
if not child:
    assert is_right(60, 100, 200)
    torch.set_num_threads(2)
    assert is_right(60, 100, 200)
    sys.exit()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_forked_process_gets_on_without_the_helpers() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])}
    subprocess.run([sys.executable, "-c", FORKED], env=environment, check=True, timeout=60)
