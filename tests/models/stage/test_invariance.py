"""A stage on a GPU with `batch_invariant: on` computes a request's rows alike in any company.

On machines without a GPU the same modules and kernels run interpreted, on the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.core.steps import StepInput
from draftline.kernels.dispatch import Machine
from draftline.models.attention.backend import choose_backend
from draftline.models.attention.kernel_attention import TileOptions
from draftline.models.layers import linear_layers
from draftline.models.layers.linear_layers import (
    GpuHead,
    GpuLinear,
    GpuPackedLinear,
    PackedLinear,
    put_packed,
)
from draftline.models.layers.model_slice import load_slice
from draftline.models.load.partition import LayerSpan
from draftline.models.load.rounding import rounded
from draftline.models.stage.gpu_path import (
    ROW_TILE,
    CudaCapture,
    GraphOptions,
    InvariantLinear,
    invariant_options,
    invariant_slice,
)
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from draftline.models.stage.plain_path import PlainPath, make_kv
from draftline.models.stage.stage import Stage
from support.fakes.products_in_order import use_products_in_order
from support.fakes.recorded_graph import RecordedGraphs
from support.inputs.steps import PagedRequest, Rows, make_step
from support.tools.graph_paths import use_graphs
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from torch import nn

NUM_LAYERS = 2
WHOLE = LayerSpan(0, NUM_LAYERS, NUM_LAYERS)
NUM_BLOCKS, BLOCK_SIZE = 40, 16
TOKENS = np.random.default_rng(0).integers(2, VOCAB_SIZE, 80).astype(int).tolist()
GRAPHS = GraphOptions(max_rows=24, max_requests=3, max_positions=320)
GPU = Machine((9, 0), has_triton=True, has_flash_attn=True)
on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="records the interpreter's kernels")


def interpreted(folder: Path, dtype: str, quantization: str = "none") -> Stage:
    """What `load_stage` makes on a GPU."""
    part = load_slice(folder, WHOLE, dtype, quantization=quantization, fused=True)
    part = invariant_slice(part)
    kv = make_kv(part, NUM_BLOCKS, BLOCK_SIZE)
    tiles = TileOptions(max_requests=3, fixed_lines=True)
    backend, _ = choose_backend(kv, part.dtype, BLOCK_SIZE, 4, "triton", tiles=tiles)
    return Stage(PlainPath(part, kv, BLOCK_SIZE, backend))


def requests() -> tuple[list[Rows], list[list[Rows]]]:
    """A request's rows of some steps, after 170 tokens; and those of two others beside it."""
    mine, first, second = (PagedRequest(range(at, at + 13), BLOCK_SIZE) for at in (0, 13, 26))
    own = [
        mine.chunk(TOKENS[:10], 170),
        mine.tree([5, 6, 7, 8], [-1, 0, 0, 1], 180),
        mine.chunk([9], 180),
    ]
    others = [
        # More rows than a tile of a product has, so that it begins with some of `own`.
        [first.chunk(TOKENS[7:65], 0), second.chunk(TOKENS[:3], 0)],
        [first.tree(TOKENS[:9], [-1, 0, 1, 2, 0, 4, 5, 1, 3], 43), second.chunk([4], 3)],
        [second.chunk(TOKENS[3:10], 4)],
    ]
    return own, others


def of_mine(stage: Stage, step: StepInput, first: int, count: int) -> torch.Tensor:
    rows = np.arange(first, first + count, dtype=np.int32)
    return stage.logits(step, None, rows)


def assert_alike(alone: Stage, among: Stage) -> None:
    """Both begin with the same noise for a cache."""
    noise = torch.randn(alone.kv.data.shape, generator=torch.Generator().manual_seed(1))
    for stage in (alone, among):
        stage.kv.data.copy_(noise)
    own, others = requests()
    for mine, beside in zip(own, others, strict=True):
        count = len(mine.tokens)
        expected = of_mine(alone, make_step([mine]), 0, count)
        step = make_step([*beside, mine])
        found = of_mine(among, step, len(step.token_ids) - count, count)
        assert expected.isfinite().all()
        assert torch.equal(found, expected)
    slots = slice(0, 13 * BLOCK_SIZE)
    assert torch.equal(alone.kv.layers[-1][slots], among.kv.layers[-1][slots])


@on_cpus
@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "dtype", "quantization"),
    [("qwen2", "bfloat16", "none"), ("gemma3", "float32", "none"), ("llama", "float32", "int8")],
)
def test_rows_are_alike_in_any_company(
    kind: str, dtype: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps in company by graphs, where there is one of their size."""
    use_products_in_order(monkeypatch)
    monkeypatch.setattr(linear_layers, "runs_triton", lambda _: True)
    save_tiny_model(kind, tmp_path, num_layers=NUM_LAYERS)
    alone, among = (interpreted(tmp_path, dtype, quantization) for _ in range(2))
    graphs = RecordedGraphs(monkeypatch)
    use_graphs(among, GRAPHS, graphs).capture_all(iter([0.0, 0.0, 61.0, 61.0]).__next__)
    assert_alike(alone, among)
    assert sum(graphs.num_replays) == 2


@on_cpus
def test_it_is_the_same_model(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    ours, theirs = interpreted(tmp_path, "float32"), load_stage(tmp_path, WHOLE, 40, BLOCK_SIZE)
    step = make_step(requests()[1][0])
    rows = np.arange(len(step.token_ids), dtype=np.int32)
    found, expected = (stage.logits(step, None, rows) for stage in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "llama"])
def test_every_product_is_replaced_and_no_weight_copied(kind: str, tmp_path: Path) -> None:
    save_tiny_model(kind, tmp_path, num_layers=NUM_LAYERS)
    part = load_slice(tmp_path, WHOLE, fused=True)
    # An activation that no kernel knows: the block stays that of transformers.
    part.layers[1].mlp = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
    assert isinstance(part.head, GpuHead)
    weights = [part.head.weight.data_ptr(), part.layers[0].self_attn.out.weight.data_ptr()]
    ours = invariant_slice(part, "reference")
    assert isinstance(ours.head, InvariantLinear)
    kept = [ours.head.weight.data_ptr(), ours.layers[0].self_attn.out.weight.data_ptr()]
    assert kept == weights
    for layer in ours.layers:
        modules = list(layer.modules())
        assert not [module for module in modules if isinstance(module, nn.Linear)]
        values = [value for module in modules for value in vars(module).values()]
        assert not [value for value in values if isinstance(value, GpuLinear)]
        assert sum(isinstance(value, InvariantLinear) for value in values) == 4
    x = torch.randn(3, 32)
    assert ours.layers[1].mlp(x).shape == (3, 32)


class Block(nn.Module):
    """One that no kernel knows."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x).tanh()


def test_quantised_products_get_a_fixed_tile_of_rows(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    part = load_slice(tmp_path, WHOLE, quantization="int8", fused=True)
    block, x = Block(), torch.randn(3, 32)
    put_packed(torch.float32)(block, "own.weight", rounded(block.own.weight.detach(), "int8"))
    part.layers[1].mlp, expected = block, block(x)
    ours = invariant_slice(part, "reference")
    for layer in ours.layers:
        modules = list(layer.modules())
        assert not [module for module in modules if isinstance(module, PackedLinear)]
        values = [value for module in modules for value in vars(module).values()]
        packed = [value for value in values if isinstance(value, GpuPackedLinear)]
        assert len(packed) >= 3
        assert {one.row_tile for one in packed} == {ROW_TILE}
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize(
    ("options", "machine", "reason"),
    [
        ({"attention": "sdpa"}, GPU, "attention is sdpa: use attention: triton or auto, or"),
        ({"attention": "flash_attn"}, GPU, "attention is flash_attn"),
        ({}, replace(GPU, has_triton=False), "triton is not installed; pip install .* or use"),
        ({}, replace(GPU, capability=(7, 5)), "capability is below 8.0; or use batch_invariant"),
    ],
)
def test_what_does_not_go_with_it_is_named(
    options: dict[str, str], machine: Machine, reason: str
) -> None:
    asked = StageOptions(batch_invariant="on", **options)
    with pytest.raises(ConfigError, match=f"batch_invariant: on .*{reason}"):
        invariant_options(asked, machine)


def test_attention_is_by_own_kernels_also_beside_flash_attn() -> None:
    asked = StageOptions(batch_invariant="on", kv_cache_dtype="fp8")
    assert invariant_options(asked, GPU) == replace(asked, attention="triton")


def test_unknown_layers_are_refused(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    part = load_slice(tmp_path, WHOLE, "bfloat16")
    with pytest.raises(
        ConfigError, match=r"batch_invariant: on needs layers .* of llama are others"
    ):
        invariant_slice(part)


def graph_stage(folder: Path, quantization: str, *, captured: bool) -> Stage:
    options = StageOptions(batch_invariant="on", quantization=quantization, max_requests=3)
    stage = load_stage(
        folder, WHOLE, NUM_BLOCKS, BLOCK_SIZE, "bfloat16", device="cuda", options=options
    )
    if captured:
        capture = CudaCapture(torch.device("cuda"))
        use_graphs(stage, GRAPHS, capture).capture_all(lambda: 0.0)
    return stage


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "quantization"), [("llama", "none"), ("gemma3", "none"), ("llama", "int8")]
)
def test_rows_are_alike_in_any_company_on_a_gpu(
    kind: str, quantization: str, tmp_path: Path
) -> None:
    save_tiny_model(kind, tmp_path, num_layers=NUM_LAYERS)
    alone, among, beside = (
        graph_stage(tmp_path, quantization, captured=each) for each in (False, True, True)
    )
    assert_alike(alone, among)
    assert_alike(among, beside)
