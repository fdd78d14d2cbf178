"""Every kernel that serving can come to has run before a stage serves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline.core.errors import StageError
from draftline.core.proposals import LogitsParams
from draftline.core.sampling import sampling_rows
from draftline.core.steps import LogitEdits, LogProbInput, StepInput
from draftline.kernels.dispatch import load_recurrence
from draftline.kernels.sampling.sampler import KernelSampler
from draftline.models.attention.backend import choose_backend
from draftline.models.attention.kernel_attention import KernelBackend, TileOptions
from draftline.models.layers import linear_layers
from draftline.models.layers.model_slice import load_slice
from draftline.models.load.partition import LayerSpan
from draftline.models.recurrence.state_pool import StatePool
from draftline.models.stage.gpu_start import warm_kernels
from draftline.models.stage.plain_path import PlainPath, make_kv
from draftline.models.stage.stage import Stage
from support.inputs.steps import PagedRequest, make_step
from support.tools.tiny_models import save_tiny_model
from triton.runtime.interpreter import InterpretedFunction

WHOLE = LayerSpan(0, 1, 1)
BLOCK_SIZE = 16
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="records interpreted kernels")


class Variants:
    """Kernels that would be launched, each with all that Triton compiles it anew for: constants,
    types of tensors, whether addresses and numbers are multiples of 16, and numbers that are 1.

    None runs: the interpreter would take minutes, and what comes out does not matter here.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: set[tuple[Any, ...]] = set()

        def noting(
            kernel: InterpretedFunction, *args: Any, grid: object, warmup: bool, **kwargs: Any
        ) -> None:
            given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            alike = kernel.kwargs.get("do_not_specialize") or ()
            facts = tuple(
                (name, variant_of(name, given[name]))
                for name in kernel.arg_names
                if name in given and name not in alike
            )
            self.seen.add((kernel.fn.__name__, facts))
            if kernel.fn.__name__ == "pick_tokens":
                given["out"].zero_()

        patch.setattr(InterpretedFunction, "run", noting)


def variant_of(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, int) and not name.isupper():
        return value == 1, value % 16 == 0
    return "a float" if isinstance(value, float) else str(value)


def serving_steps() -> Iterator[StepInput]:
    """Chunks and trees of several sizes, behind contexts that are split; all kinds of sampling."""
    rng = np.random.default_rng(0)
    first, second = PagedRequest(range(12), BLOCK_SIZE), PagedRequest(range(12, 24), BLOCK_SIZE)
    tokens = rng.integers(2, 90, 170).tolist()
    yield make_step([first.chunk(tokens[:20], 0)])
    yield make_step([first.tree(tokens[:9], [-1, 0, 0, 1, 1, 2, 2, 3, 4], 20)], moves=[(2, 5)])
    chunk, tree = second.chunk(tokens[:30], 0), first.tree(tokens[:2], [-1, 0], 150)
    step = make_step([tree, chunk])
    count = len(step.logits_rows)
    kinds = [
        LogitsParams(),
        LogitsParams(top_k=3),
        LogitsParams(top_p=0.8),
        LogitsParams(min_p=0.1),
    ]
    params = [kinds[row % 4] for row in range(count)]
    none = np.empty(0, dtype=np.int32)
    bias = LogitEdits(0, 1, np.arange(3, dtype=np.int32), np.ones(3, np.float32), None, None)
    mask = LogitEdits(1, 1, none, none.astype(np.float32), None, np.full((1, 4), 7, np.uint32))
    log_probs = LogProbInput(of_targets=True)
    for temperature in (0.0, 1.0):
        sampling = sampling_rows([temperature] * count, params, range(count), np.arange(count))
        yield replace(step, sampling=sampling, edits=(bias, mask), log_probs=log_probs)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_serving_launches_no_kernel_for_the_first_time(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_layers, "runs_triton", lambda _: True)
    save_tiny_model("gemma3", tmp_path, num_layers=1)
    monkeypatch.setattr("draftline.models.stage.stage.choose_sampler", lambda _: KernelSampler())
    part = load_slice(tmp_path, WHOLE, quantization=quantization, fused=True)
    kv = make_kv(part, 24, BLOCK_SIZE)
    tiles = TileOptions(max_requests=2)
    backend, _ = choose_backend(
        kv, part.dtype, BLOCK_SIZE, part.config.num_attention_heads, "triton", tiles=tiles
    )
    stage = Stage(PlainPath(part, kv, BLOCK_SIZE, backend))
    variants = Variants(monkeypatch)
    assert isinstance(backend, KernelBackend)
    warm_kernels(stage, backend.share, stage.vocab_size)
    assert not kv.data.any()
    compiled = set(variants.seen)
    for step in serving_steps():
        stage.run(step)
    assert {name for name, _ in compiled} >= {"attend_tiles", "copy_rows", "find_doubt"}
    assert {name for name, _ in variants.seen - compiled} == set()


def test_steps_of_hybrids_launch_no_kernel_for_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LayerSpan(0, 4, 4)
    monkeypatch.setattr("draftline.models.stage.stage.choose_sampler", lambda _: KernelSampler())
    part = load_slice(save_tiny_model("qwen3_5_text", tmp_path), whole)
    kv = make_kv(part, 24, BLOCK_SIZE)
    backend, _ = choose_backend(kv, part.dtype, BLOCK_SIZE, 4, "triton")
    assert part.forward is not None
    shapes, rule = part.forward.state_shapes, load_recurrence("triton")
    states = StatePool(shapes, 3, 500, BLOCK_SIZE, torch.empty(0), rule)
    stage = Stage(PlainPath(part, kv, BLOCK_SIZE, backend, states=states))
    variants = Variants(monkeypatch)
    assert isinstance(backend, KernelBackend)
    warm_kernels(stage, backend.share, stage.vocab_size)
    compiled = set(variants.seen)
    request = PagedRequest(range(24), BLOCK_SIZE)
    tree = make_step([request.tree([5, 6, 7], [-1, 0, 0], 20)])
    with pytest.raises(StageError):
        stage.run(tree)
    for step in (make_step([request.chunk([*range(2, 22)], 0)]), tree):
        stage.run(step)
    assert {name for name, _ in compiled} >= {"attend_tiles", "solve_requests"}
    assert {name for name, _ in variants.seen - compiled} == set()
