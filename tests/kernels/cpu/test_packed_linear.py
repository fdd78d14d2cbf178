from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.kernels.cpu import build as cpu_build
from draftline.kernels.cpu.build import vectors
from draftline.kernels.cpu.packed_linear import PackedWeight, pack_weights, packed_linear
from support.tools.cpu_kernels import load_cpu_kernels

pytestmark = pytest.mark.compiler

# The last has more inputs than one pass over a panel takes.
SIZES = [(8, 5), (32, 64), (33, 130), (1100, 70)]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5, 6, 7, 13])
def test_equals_the_reference(inputs: int, outputs: int, rows: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs), torch.randn(inputs, outputs)
    packed = pack_weights([weight], vectors().panel)
    ours = packed_linear(x, packed, outputs)
    torch.testing.assert_close(ours, x @ weight, rtol=0, atol=1e-3)
    panels, _, panel = packed.codes.shape
    unpacked = packed.codes.transpose(0, 1).reshape(inputs, panels * panel)[:, :outputs]
    assert torch.equal(unpacked, weight)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_row_is_the_same_bit_by_bit_in_any_company(inputs: int, outputs: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(13, inputs)
    packed = pack_weights([torch.randn(inputs, outputs)], vectors().panel)
    together = packed_linear(x, packed, outputs)
    for rows in (1, 2, 5, 6):
        for first in range(13 - rows):
            part = slice(first, first + rows)
            assert torch.equal(packed_linear(x[part], packed, outputs), together[part])


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 6, 13, 40])
def test_weights_of_a_bfloat16_checkpoint_stay_small_and_give_the_same_bits(
    inputs: int, outputs: int, rows: int
) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs), torch.randn(inputs, outputs).bfloat16().float()
    packed = pack_weights([weight], vectors().panel)
    assert packed.codes.dtype == torch.bfloat16
    found = packed_linear(x, packed, outputs)
    assert torch.equal(found, packed_linear(x, PackedWeight(packed.codes.float()), outputs))
    weight[-1, -1] += 2e-4
    assert pack_weights([weight], vectors().panel).codes.dtype == torch.float32


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_change_no_bit(threads: int) -> None:
    torch.manual_seed(2)
    x, packed = torch.randn(70, 600), pack_weights([torch.randn(600, 1000)], vectors().panel)
    one = packed_linear(x, packed, 1000)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(packed_linear(x, packed, 1000), one)
    finally:
        torch.set_num_threads(1)


def test_weights_side_by_side_are_packed_as_one() -> None:
    torch.manual_seed(3)
    parts = [torch.randn(9, width) for width in (70, 3, 200)]
    panel = vectors().panel
    joined = pack_weights([torch.cat(parts, dim=1)], panel)
    assert torch.equal(pack_weights(parts, panel).codes, joined.codes)


def test_a_wrong_shape_is_refused() -> None:
    packed = pack_weights([torch.randn(8, 5)], vectors().panel)
    with pytest.raises(RuntimeError):
        packed_linear(torch.randn(2, 9), packed, 5)
    with pytest.raises(RuntimeError):
        packed_linear(torch.randn(2, 8), packed, 5 + vectors().panel)


def test_a_missing_compiler_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"compile: .*no-such-compiler.*apt install g\+\+"):
        cpu_build.find_compiler()


def test_a_failing_compiler_is_an_error_that_quotes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "fails"
    compiler.write_text("#!/bin/sh\necho 'error: no such flag' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(ConfigError, match=r"compile: .*error: no such flag"):
        cpu_build.build(tmp_path / "library.so")
    assert not (tmp_path / "library.so").exists()
