"""A stage with the operators of `kernels/` answers as one with torch's attention does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.core.steps import StepInput
from draftline.kernels.attention.spec import AttentionShape
from draftline.kernels.kv import kv_cache_kernels as paged_kv_ops
from draftline.kernels.kv import reference as kv_reference
from draftline.models.attention.kernel_attention import FlashBackend, KernelBackend, TileOptions
from draftline.models.attention.step_attention import PagedKv
from draftline.models.layers.model_slice import load_slice
from draftline.models.load.partition import LayerSpan
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from draftline.models.stage.plain_path import PlainPath
from draftline.models.stage.stage import Stage
from safetensors.torch import load_file, save_file
from support.fakes.fake_flash import flash_attn_varlen_func
from support.inputs.steps import PagedRequest, Rows, make_step
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model

TOKENS = np.random.default_rng(0).integers(2, VOCAB_SIZE, 64).astype(int).tolist()
NODES, PARENTS = [5, 6, 7, 8, 9, 10, 11], [-1, 0, 0, 1, -1, 4, 3]
NUM_LAYERS = 2
WHOLE = LayerSpan(0, NUM_LAYERS, NUM_LAYERS)
# Plain; a window in all layers; a soft cap and a window in some; norms of heads.
KINDS = ["llama", "mistral", "gemma2", "gemma3"]
# The others with the whole matrix.
FEW = {"llama", "gemma2"}
# Logits are of the order of 3.
BOUND = 1e-4

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stages of this file are on CPUs")


def steps(block_size: int = 4) -> list[StepInput]:
    """Prompts in chunks; then trees, a chunk and a token; then a move and what follows it."""
    first, second, third = (
        PagedRequest(blocks, block_size)
        for blocks in ([2, 9, 4, 1, 7, 12, 13], [3, 5, 6, 8], [10, 11, 14, 15])
    )
    path = [0, 1, 3, 6]
    moves = np.stack((first.slots(18, len(NODES))[path], first.slots(18, 4)), axis=1)
    mixed: Sequence[Rows] = [
        first.tree(NODES, PARENTS, 18, in_flight=4),
        second.chunk(TOKENS[3:9], 3),
        third.tree([60, 61], [-1, -1], 1),
    ]
    return [
        make_step([first.chunk(TOKENS[:13], 0), second.chunk(TOKENS[:3], 0)]),
        make_step([first.chunk(TOKENS[13:18], 13), third.chunk([41], 0)]),
        make_step([first.tree(NODES[:4], PARENTS[:4], 18)]),
        make_step(mixed),
        make_step([first.chunk([50, 51], 22), second.chunk([7], 9)], moves=moves),
    ]


def assert_same(ours: Stage, theirs: Stage, bound: float, block_size: int = 4) -> None:
    for step in steps(block_size):
        rows = np.arange(len(step.token_ids))
        expected = theirs.logits(step, None, rows)
        found = ours.logits(step, None, rows)
        np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
        np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))
    for side in (ours, theirs):
        assert side.kv.data.float().isfinite().all()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in FEW else pytest.mark.full) for kind in KINDS]
)
def test_triton_equals_sdpa(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_model(kind, tmp_path, num_layers=NUM_LAYERS)
    ours, theirs = (load_stage(folder, WHOLE, 16, 4, attention=name) for name in ("triton", "sdpa"))
    assert_same(ours, theirs, BOUND)


def test_triton_equals_sdpa_in_bfloat16(tmp_path: Path) -> None:
    """Through transformers' own attention modules, which hand over keys and values apart."""
    folder = save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    exact = load_stage(folder, WHOLE, 16, 4)
    rounded = [
        load_stage(folder, WHOLE, 16, 4, "bfloat16", attention=name) for name in ("triton", "sdpa")
    ]
    errors = []
    for step in steps():
        rows = np.arange(len(step.token_ids))
        logits = exact.logits(step, None, rows)
        errors.append([(s.logits(step, None, rows) - logits).square().mean() for s in rounded])
    ours, theirs = np.sqrt(np.mean(errors, axis=0))
    assert ours < 1.3 * theirs < 0.5


def stage_with(
    folder: Path, make: Callable[[PagedKv, int, AttentionShape], KernelBackend],
    block_size: int, **options: Any,
) -> Stage:  # fmt: skip
    part = load_slice(folder, WHOLE)
    shape = AttentionShape(4, part.config.num_key_value_heads, 8)
    kv = PagedKv(NUM_LAYERS, 16 * block_size, shape.num_kv_heads, 8, **options)
    return Stage(PlainPath(part, kv, block_size, make(kv, block_size, shape)))


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.full), "gemma2"])
def test_flash_attn_equals_sdpa(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_model(kind, tmp_path, num_layers=NUM_LAYERS)

    def backend(kv: PagedKv, block_size: int, shape: AttentionShape) -> FlashBackend:
        return FlashBackend(kv, block_size, shape, "triton", flash_attn_varlen_func)

    theirs = load_stage(folder, WHOLE, 16, 256, attention="sdpa")
    assert_same(stage_with(folder, backend, 256), theirs, BOUND, 256)


def test_fp8_caches_are_scaled(tmp_path: Path) -> None:
    """Keys that only fit after scaling: without the scales they would be cut at 448."""
    folder = save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    theirs = load_stage(folder, WHOLE, 16, 4, attention="sdpa")
    logits = []
    for scale in (0.03, 1e-4):

        def backend(kv: PagedKv, block_size: int, shape: AttentionShape) -> KernelBackend:
            return KernelBackend(kv, block_size, shape, "reference")

        scales = torch.full((NUM_LAYERS, 2, 2), scale)
        ours = stage_with(folder, backend, 4, dtype=torch.float8_e4m3fn, scales=scales)
        step = steps()[0]
        rows = np.arange(len(step.token_ids))
        expected = theirs.logits(step, None, rows)
        logits.append(float((ours.logits(step, None, rows) - expected).abs().max()))
    assert logits[0] < logits[1] / 4


@pytest.mark.parametrize("factor", [2.0**-12, 2.0**12])
def test_fp8_caches_without_calibration_hold_keys_and_values_of_any_size(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the largest number of e4m3, or below its least, as they move with their rows."""
    # Triton's interpreter loses the carry when it rounds to FP8.
    monkeypatch.setattr(paged_kv_ops, "write_kv", kv_reference.write_kv)
    save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if "v_proj" in name:
            tensor.mul_(factor)
        if "o_proj" in name:
            tensor.div_(factor)
    save_file(tensors, tmp_path / "model.safetensors")
    theirs = load_stage(tmp_path, WHOLE, 16, 4, attention="sdpa")
    ours = load_stage(tmp_path, WHOLE, 16, 4, options=StageOptions(kv_cache_dtype="fp8"))
    assert ours.kv.has_row_scales
    talk = PagedRequest(range(16), 4)
    first = make_step([talk.chunk(list(range(2, 12)), 0)])
    then = make_step([talk.chunk([7, 8], 9)], moves=[(9, 8), (8, 7)])
    for step in (first, then):
        rows = np.arange(len(step.token_ids), dtype=np.int32)
        found, expected = (stage.logits(step, None, rows) for stage in (ours, theirs))
        error = (found - expected).square().mean().sqrt()
        assert 0 < error < 0.15 * expected.std()


def test_a_backend_that_cannot_run_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    with pytest.raises(ConfigError, match="attention: cannot be flash_attn: it needs a GPU"):
        load_stage(folder, WHOLE, 16, 4, attention="flash_attn")


def test_more_requests_than_were_foretold_find_room(tmp_path: Path) -> None:
    """Their contexts are split as those of few are."""
    folder = save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)

    def backend(kv: PagedKv, block_size: int, shape: AttentionShape) -> KernelBackend:
        return KernelBackend(kv, block_size, shape, tiles=TileOptions(max_requests=1))

    ours, theirs = stage_with(folder, backend, 32), load_stage(folder, WHOLE, 16, 32)
    noise = torch.randn(ours.kv.data.shape, generator=torch.Generator().manual_seed(0))
    for stage in (ours, theirs):
        stage.kv.data.copy_(noise)
    talks = [PagedRequest(range(first, first + 5), 32) for first in (0, 5, 10)]
    for asked in (talks[:1], talks, talks[:2]):
        step = make_step([talk.chunk([7, 8], 135) for talk in asked])
        rows = np.arange(len(step.token_ids))
        found, expected = (stage.logits(step, None, rows) for stage in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=0, atol=BOUND)
    assert isinstance(ours.path, PlainPath)
    assert isinstance(ours.path.attention, KernelBackend)
    partials = ours.path.attention._partials
    assert len(partials.sums) == 3 * partials.rule.split_lines
