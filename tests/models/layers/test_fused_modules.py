"""Stages with fused modules, and with the sampling kernels, answer as those without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.proposals import LogitsParams
from draftline.core.request.allowed_tokens import mask_of
from draftline.core.sampling import sampling_rows
from draftline.core.steps import LogitEdits, LogProbInput, StepOutput
from draftline.kernels.sampling.reference import TorchSampler
from draftline.kernels.sampling.sampler import KernelSampler, choose_sampler
from draftline.models.attention.step_attention import PagedKv
from draftline.models.layers.fused_modules import (
    FusedAttention,
    FusedGatedMlp,
    FusedLayer,
    FusedRmsNorm,
)
from draftline.models.layers.model_slice import load_slice
from draftline.models.load.partition import LayerSpan
from draftline.models.stage.plain_path import PlainPath
from draftline.models.stage.stage import Stage
from support.inputs.steps import BLOCK_SIZE, PagedRequest, make_step
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model

TOKENS = np.random.default_rng(3).integers(2, 97, 30).tolist()
NUM_LAYERS = 2
WHOLE = LayerSpan(0, NUM_LAYERS, NUM_LAYERS)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_FUSED_LAYERS = {"llama": True, "qwen3": True, "gemma": True, "gemma2": False, "gemma3": False}


def stage_of(folder: Path, dtype: str = "float32", *, fused: bool) -> Stage:
    part = load_slice(folder, WHOLE, dtype, DEVICE, fused=fused)
    kv_heads = part.config.num_key_value_heads
    shape = (NUM_LAYERS, 10 * BLOCK_SIZE, kv_heads, 8)
    return Stage(PlainPath(part, PagedKv(*shape, dtype=part.dtype, device=DEVICE), BLOCK_SIZE))


@pytest.mark.parametrize("kind", HAS_FUSED_LAYERS)
def test_layers_equal_the_unreplaced_ones(kind: str, tmp_path: Path) -> None:
    save_tiny_model(kind, tmp_path, num_layers=NUM_LAYERS)
    ours, theirs = (stage_of(tmp_path, fused=fused) for fused in (True, False))
    layer = ours.path.part.layers[0]
    assert isinstance(layer, FusedLayer) == HAS_FUSED_LAYERS[kind]
    assert isinstance(layer.self_attn, FusedAttention)
    assert isinstance(layer.mlp, FusedGatedMlp)
    assert isinstance(ours.path.part.norm, FusedRmsNorm)
    request = PagedRequest([2, 9, 4, 1, 7, 3, 5, 8])
    prompt = make_step([request.chunk(TOKENS[:9], 0)])
    tree = make_step([request.tree([5, 6, 7, 8], [-1, 0, 0, 1], 9)])
    for step in (prompt, tree):
        rows = np.arange(len(step.token_ids))
        found, expected = (stage.logits(step, None, rows).cpu() for stage in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_bfloat16_is_as_exact_as_the_original_modules(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    exact = stage_of(tmp_path, fused=False)
    rounded = [stage_of(tmp_path, "bfloat16", fused=fused) for fused in (True, False)]
    step = make_step([PagedRequest([2, 9, 4, 1, 7]).chunk(TOKENS[:20], 0)])
    rows = np.arange(20)
    logits = exact.logits(step, None, rows)
    ours, theirs = (
        float((stage.logits(step, None, rows) - logits).square().mean().sqrt()) for stage in rounded
    )
    assert ours < 2 * theirs < 0.5


@torch.inference_mode()
def test_what_a_stage_is_given_stays_as_it_is(tmp_path: Path) -> None:
    """Residuals are added in place, but never to what belongs to the stage before."""
    save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    part = load_slice(tmp_path, LayerSpan(1, 2, NUM_LAYERS), "float32", DEVICE, fused=True)
    stage = Stage(PlainPath(part, PagedKv(1, 40, 2, 8, device=DEVICE), BLOCK_SIZE))
    hidden = torch.randn(3, 32, device=DEVICE)
    before = hidden.clone()
    stage.run(make_step([PagedRequest([2, 9]).chunk(TOKENS[:3], 0)]), hidden)
    assert torch.equal(hidden, before)


def test_stages_sample_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed rows with a mask; then a typical_p, which torch chooses for."""
    save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    theirs = stage_of(tmp_path, fused=False)
    monkeypatch.setattr("draftline.models.stage.stage.choose_sampler", lambda _: KernelSampler())
    ours = stage_of(tmp_path, fused=False)
    plain = make_step([PagedRequest([2, 9, 4]).chunk(TOKENS[:6], 0)])
    rows = np.arange(6, dtype=np.int32)
    none = np.empty(0, dtype=np.int32)
    mask = mask_of(range(0, VOCAB_SIZE, 3), VOCAB_SIZE)[None]
    edits = (LogitEdits(2, 3, none, none.astype(np.float32), None, mask),)
    for typical_p in (1.0, 0.5):
        shapings = [
            LogitsParams(),
            LogitsParams(top_k=5),
            LogitsParams(top_p=0.8),
            LogitsParams(min_p=0.1),
        ]
        shapings += [LogitsParams(), LogitsParams(typical_p=typical_p)]
        sampling = sampling_rows([0, 1, 2, 1, 0, 1], shapings, range(6), np.arange(6))
        step = replace(
            plain, logits_rows=rows, sampling=sampling, edits=edits, log_probs=LogProbInput(True, 3)
        )
        found, expected = ours.run(step), theirs.run(step)
        assert isinstance(found, StepOutput)
        assert isinstance(expected, StepOutput)
        np.testing.assert_array_equal(found.target_tokens, expected.target_tokens)
        assert (found.target_tokens[2:5] % 3 == 0).all()
        ours_of, theirs_of = found.log_probs.of_targets, expected.log_probs.of_targets
        assert ours_of is not None
        assert theirs_of is not None
        np.testing.assert_allclose(ours_of, theirs_of, atol=1e-5)


def test_scratch_grows_with_the_rows() -> None:
    sampler = KernelSampler()
    for num_rows, vocab_size in ((1, 50), (3, 50), (2, 50), (2, 60)):
        logits = np.random.default_rng(num_rows).normal(size=(num_rows, vocab_size))
        data = torch.from_numpy(logits.astype(np.float32)).to(DEVICE)
        sampling = sampling_rows(
            [1.0] * num_rows,
            [LogitsParams(top_k=4)] * num_rows,
            range(num_rows),
            np.arange(num_rows),
        )
        found = sampler.choose(data, sampling)
        expected = TorchSampler().choose(data, sampling)
        assert found.tolist() == expected.tolist()


def test_cpus_sample_by_torch() -> None:
    assert isinstance(choose_sampler(torch.device("cpu")), TorchSampler)
