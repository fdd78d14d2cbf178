"""Perplexity of a text: transformers' own, however few layers are in memory at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.cluster.pipeline import perplexity as module
from draftline.cluster.pipeline.perplexity import perplexity
from draftline.models.load.rounding import rounded
from safetensors.torch import load_file, save_file
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from transformers import AutoModelForCausalLM

DOCUMENTS = [
    np.random.default_rng(seed).integers(2, VOCAB_SIZE, count).astype(np.int32)
    for seed, count in ((0, 40), (1, 2), (2, 17))
]


def by_transformers(folder: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    with torch.no_grad():
        for document in DOCUMENTS:
            tokens = torch.from_numpy(document).long()
            logits = model(tokens[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none"))
    return torch.cat(losses).double().mean().exp().item()


@pytest.mark.compiler
@pytest.mark.parametrize("kind", ["none", "int4"])
def test_it_is_that_of_the_values(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model("llama", tmp_path)
    found = perplexity(folder, DOCUMENTS, "cpu", "float32", kind)
    monkeypatch.setattr(module, "MOST_BYTES", 1)
    assert perplexity(folder, DOCUMENTS, "cpu", "float32", kind) == found
    exact = by_transformers(folder)
    if kind != "none":
        weights = load_file(folder / "model.safetensors")
        for name in weights:
            if name.endswith("_proj.weight"):
                weights[name] = rounded(weights[name], kind).dequantized(torch.float32)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        assert abs(by_transformers(folder) / exact - 1) > 1e-3
    assert found == pytest.approx(by_transformers(folder), rel=1e-5)


def test_a_hybrids_texts_have_states_of_their_own(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3_next", tmp_path)
    found = perplexity(folder, DOCUMENTS, "cpu", "float32")
    assert found == pytest.approx(by_transformers(folder), rel=1e-4)


def test_stages_without_the_kernels_round_alike(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    found = perplexity(folder, DOCUMENTS, "cpu", "bfloat16", "int4")
    exact = perplexity(folder, DOCUMENTS, "cpu", "bfloat16")
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith("_proj.weight"):
            half = weights[name].bfloat16()
            weights[name] = rounded(half, "int4").dequantized(torch.bfloat16).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    of_values = perplexity(folder, DOCUMENTS, "cpu", "bfloat16")
    assert found == pytest.approx(of_values, rel=1e-3)
    assert abs(found / exact - 1) > 1e-2
