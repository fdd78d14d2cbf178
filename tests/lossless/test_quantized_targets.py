"""Answers of a quantised target with drafts are its plain decoding's, and those of its values."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.models.load.bundled import demo_path
from draftline.models.load.rounding import rounded
from safetensors.torch import load_file, save_file
from support.inputs.mxfp4_checkpoint import save_mxfp4_pair
from support.inputs.quantized_checkpoints import FORMATS, quantize, save_pair
from support.tools.greedy_answers import by_engine
from support.tools.tiny_tokenizers import single_bytes

# The head reads the target's embeddings and output head, and was trained on unquantised states.
DRAFTERS = (DrafterConfig(kind="head", model="demo-griffin"), DrafterConfig(kind="prompt_lookup"))
PLAIN = RequestOptions(speculative=False)


def answers(engine: Engine, options: RequestOptions | None = None) -> list[RequestOutput]:
    """Greedy and sampled ones."""
    prompts = [prompt.text for prompt in held_out_prompts()[:4]]
    return [
        output
        for temperature in (0.0, 0.8)
        for output in engine.generate(
            prompts, SamplingParams(temperature=temperature, seed=3, max_tokens=40), options
        )
    ]


def token_ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(one.token_ids) for one in outputs]


@pytest.mark.parametrize(
    ("form", "stages"),
    [
        pytest.param("gptq 4, act order", 1, marks=pytest.mark.full),
        ("fp8 blocks", 2),
        pytest.param("packed 4, asymmetric", 1, marks=pytest.mark.full),
    ],
)
def test_drafts_change_no_token_of_a_quantized_target(
    form: str, stages: int, tmp_path: Path
) -> None:
    pair = quantize(demo_path(), FORMATS[form], tmp_path)
    settings = {"drafters": DRAFTERS, "node_budget": "full", "pipeline_parallel_size": stages}
    with Engine(EngineConfig(model=str(pair.quantized), **settings)) as engine:
        plain = answers(engine, PLAIN)
        drafted = answers(engine)
    assert token_ids(drafted) == token_ids(plain)
    lengths = [length for one in drafted for length in one.metrics.accepted_lengths]
    assert np.mean(lengths) > 0.5
    with Engine(EngineConfig(model=str(pair.plain), pipeline_parallel_size=stages)) as engine:
        assert token_ids(answers(engine)) == token_ids(plain)
    with Engine(EngineConfig(model="demo", pipeline_parallel_size=stages)) as engine:
        assert token_ids(answers(engine)) != token_ids(plain)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("form", "stages", "compiled"),
    [
        ("awq", 2, "auto"), ("fp8 blocks", 1, "auto"), ("mxfp4", 2, "auto"), ("gptq 4", 1, "off"),
        pytest.param("packed 4", 1, "auto", marks=pytest.mark.full),
        pytest.param("compressed int8", 2, "auto", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_drafts_change_no_token_of_a_mixture_that_keeps_its_experts(
    form: str, stages: int, compiled: str, tmp_path: Path
) -> None:
    """Greedily, as with the experts' values, and drawn with a seed."""
    pair = (
        save_mxfp4_pair(tmp_path)
        if form == "mxfp4"
        else save_pair("qwen3_moe", FORMATS[form], tmp_path)
    )
    small, wide = (
        by_engine(with_tokenizer(folder), stages, compile=compiled)
        for folder in (pair.quantized, pair.plain)
    )
    assert small == wide
    by_engine(pair.quantized, stages, temperature=0.9, compile=compiled)


def with_tokenizer(folder: Path) -> Path:
    single_bytes().save_pretrained(folder)
    return folder


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("quantization", "stages"),
    [
        ("int4", 2),
        pytest.param("int8", 1, marks=pytest.mark.full),
        pytest.param("fp8", 1, marks=pytest.mark.full),
    ],
)
def test_drafts_change_no_token_of_a_target_that_is_rounded(
    quantization: str, stages: int, tmp_path: Path
) -> None:
    settings = {"pipeline_parallel_size": stages, "compile": "auto"}
    rounding = EngineConfig(
        model="demo", quantization=quantization, drafters=DRAFTERS, node_budget="full", **settings
    )
    with Engine(rounding) as engine:
        plain = answers(engine, PLAIN)
        drafted = answers(engine)
    assert token_ids(drafted) == token_ids(plain)
    values = shutil.copytree(demo_path(), tmp_path / "values")
    weights = load_file(values / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            weights[name] = rounded(weight, quantization).dequantized(torch.float32)
    save_file(weights, values / "model.safetensors", metadata={"format": "pt"})
    with Engine(EngineConfig(model=str(values), **settings)) as engine:
        assert token_ids(answers(engine)) == token_ids(plain)
