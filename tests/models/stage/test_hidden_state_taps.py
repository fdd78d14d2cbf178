"""States that stages hand out to drafters, against transformers' own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.cluster.transport.stage_spec import StageSpec
from draftline.core.errors import ConfigError
from draftline.core.steps import NO_HEADS, HeadInput, StepInput, StepOutput, prompt_step
from draftline.core.verify.walk import accepted_rows
from draftline.models.load.model_info import read_model_info
from draftline.models.load.partition import partition_layers
from draftline.models.stage.cpu_path import CpuPath
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from draftline.models.stage.stage import Stage
from support.tools.cpu_kernels import load_cpu_kernels
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

BLOCK_SIZE = 16
NUM_ROWS = 21
# Embeddings, a layer of each of three stages, and the last one, which is normed.
LAYERS = (-1, 0, 2, 3)
NOTED = (0, 3)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(request.param, tmp_path_factory.mktemp("tiny"))


def stages_of(
    checkpoint: Path, count: int, layers: tuple[int, ...], compile_: str = "off"
) -> list[Stage]:
    options = StageOptions(feature_layers=layers, compile=compile_)
    return [
        load_stage(checkpoint, span, 4, BLOCK_SIZE, options=options)
        for span in partition_layers(checkpoint, count)
    ]


def hidden_size(checkpoint: Path) -> int:
    return read_model_info(checkpoint).hidden_size


def run(stages: list[Stage], step: StepInput) -> StepOutput:
    hidden: Tensor | StepOutput | None = None
    for stage in stages:
        assert not isinstance(hidden, StepOutput)
        hidden = stage.run(step, hidden)
    assert isinstance(hidden, StepOutput)
    return hidden


def step_of(tokens: list[int]) -> StepInput:
    step = prompt_step(len(tokens), BLOCK_SIZE)
    return replace(step, token_ids=np.array(tokens, dtype=np.int32), heads=HeadInput((0,)))


@pytest.mark.parametrize("compile_", ["off", "auto"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_features_are_the_layers_outputs(checkpoint: Path, count: int, compile_: str) -> None:
    load_cpu_kernels()
    tokens = [(5 * k) % VOCAB_SIZE for k in range(NUM_ROWS)]
    stages = stages_of(checkpoint, count, LAYERS, compile_)
    assert isinstance(stages[0].path, CpuPath) == (compile_ == "auto")
    features = run(stages, step_of(tokens)).features
    # By torch's attention transformers 5.17 left out the soft bounds of Gemma 2.
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        states = model.base_model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    # What enters layer k is the output of layer k - 1; the last of the states is normed.
    expected = torch.cat([states[layer + 1][0] for layer in LAYERS], dim=-1)
    assert features is not None
    torch.testing.assert_close(torch.from_numpy(features), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("compile_", ["off", "auto"])
def test_who_hands_out_features_chooses_as_before(checkpoint: Path, compile_: str) -> None:
    load_cpu_kernels()
    step = step_of([(3 * k) % VOCAB_SIZE for k in range(NUM_ROWS)])
    tapped = run(stages_of(checkpoint, 2, LAYERS, compile_), step)
    plain = run(stages_of(checkpoint, 2, (), compile_), replace(step, heads=NO_HEADS))
    assert np.array_equal(tapped.target_tokens, plain.target_tokens)
    assert plain.features is None


def test_hidden_states_between_stages_are_as_wide_as_said(checkpoint: Path) -> None:
    step = step_of([1, 2, 3])
    first, second, last = stages_of(checkpoint, 3, LAYERS)
    hidden = first.run(step)
    assert isinstance(hidden, Tensor)
    assert hidden.shape == (3, first.path.taps.output_size) == (3, second.path.taps.input_size)
    assert second.path.taps.output_size == last.path.taps.input_size > first.path.taps.output_size
    assert last.empty_hidden(5).shape == (5, last.path.taps.input_size)


@pytest.mark.parametrize("count", [2, 3])
def test_borders_are_as_wide_as_what_is_noted_before_them(checkpoint: Path, count: int) -> None:
    stages, spans = stages_of(checkpoint, count, NOTED), partition_layers(checkpoint, count)
    hidden: Tensor | StepOutput | None = None
    for stage, span in zip(stages, spans, strict=True):
        spec = StageSpec(
            model_path=str(checkpoint), span=span, num_blocks=4, block_size=BLOCK_SIZE,
            hidden_size=hidden_size(checkpoint), options=StageOptions(feature_layers=NOTED),
        )  # fmt: skip
        assert (stage.path.taps.input_size, stage.path.taps.output_size) == (
            spec.input_size, spec.output_size,
        )  # fmt: skip
        assert not isinstance(hidden, StepOutput)
        hidden = stage.run(step_of([1, 2, 3]), hidden)
        if not span.is_last:
            own = hidden_size(checkpoint)
            wide = own * (1 + sum(layer < span.last for layer in NOTED))
            assert isinstance(hidden, Tensor)
            assert hidden.shape == (3, wide)


def test_a_stage_without_rows_hands_on_none(checkpoint: Path) -> None:
    [first, _] = stages_of(checkpoint, 2, LAYERS)
    hidden = first.run(replace(step_of([]), request_starts=np.zeros(2, dtype=np.int32)))
    assert isinstance(hidden, Tensor)
    assert hidden.shape == (0, first.path.taps.output_size)


def test_layers_that_the_model_has_not_are_refused(checkpoint: Path) -> None:
    for layers in ((4,), (-2,)):
        with pytest.raises(ConfigError, match="are not layers of a model that has 4"):
            stages_of(checkpoint, 1, layers)


def test_rows_of_chunks_are_all_accepted() -> None:
    step = step_of([4, 5, 6])
    assert accepted_rows(step, step.token_ids).tolist() == [0, 1, 2]
