"""Steps of several tokens, against steps of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.arrays import Int32
from draftline.core.steps import (
    HeadDrafts,
    HeadInput,
    HeadTask,
    MultiStepInput,
    SamplingRows,
    StepInput,
    StepOutput,
)
from draftline.models.load.partition import LayerSpan
from draftline.models.stage.cpu_path import CpuPath
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from draftline.models.stage.stage import Stage
from draftline.models.stage.stage_heads import MakeHeads, TextRows
from support.inputs.steps import BLOCK_SIZE, PagedRequest, make_step
from support.tools.cpu_kernels import FOLDER, load_cpu_kernels
from support.tools.tiny_models import KINDS, VOCAB_SIZE, save_tiny_model
from torch import Tensor

pytestmark = pytest.mark.compiler

PROMPTS = [np.random.default_rng(n).integers(2, VOCAB_SIZE, n).tolist() for n in (5, 21, 1)]
# Blocks far apart, and steps that cross from one to the next.
REQUESTS = [
    PagedRequest(blocks)
    for blocks in ([9, 3, 8, 50], [20, 2, 30, 1, 29, 28, 51, 52], range(40, 44))
]
COUNT = 7
NO_ENDS = np.empty((3, 0), dtype=np.int32)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


def prompted_stage(
    folder: Path,
    kind: str,
    feature_layers: tuple[int, ...] = (),
    make_heads: MakeHeads | None = None,
) -> Stage:
    """One that has cached all prompts but their last tokens."""
    layers = KINDS[kind].config().num_hidden_layers
    options = StageOptions(compile="auto", compile_cache=str(FOLDER), feature_layers=feature_layers)
    stage = load_stage(
        folder, LayerSpan(0, layers, layers), 60, BLOCK_SIZE, options=options, make_heads=make_heads
    )
    parts = zip(REQUESTS, PROMPTS, strict=True)
    stage.run(make_step([request.chunk(prompt[:-1], 0) for request, prompt in parts]))
    return stage


def decoding_step(tokens: Int32, num_before: int, temperature: float) -> StepInput:
    """A row for each request, `num_before` tokens behind its prompt."""
    at = [len(prompt) - 1 + num_before for prompt in PROMPTS]
    parts = zip(REQUESTS, tokens.tolist(), at, strict=True)
    step = make_step([request.tree([token], [-1], place) for request, token, place in parts])
    # The first is greedy, whatever the others are.
    temperatures = np.array([0.0, temperature, temperature], dtype=np.float32)
    seeds, positions = np.arange(3, dtype=np.int64) + 11, np.array(at, dtype=np.int64) + 1
    return replace(step, sampling=SamplingRows.unfiltered(temperatures, seeds, positions))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tokens_and_kv_are_those_of_single_steps(
    kind: str, temperature: float, tmp_path: Path
) -> None:
    save_tiny_model(kind, tmp_path)
    one, several = prompted_stage(tmp_path, kind), prompted_stage(tmp_path, kind)
    assert several.decodes_several
    last = np.array([prompt[-1] for prompt in PROMPTS], dtype=np.int32)
    expected = [last]
    for index in range(COUNT):
        output = one.run(decoding_step(expected[-1], index, temperature))
        assert isinstance(output, StepOutput)
        assert output.decoded is None
        expected.append(output.target_tokens)
    step = decoding_step(last, 0, temperature)
    found = several.run(replace(step, multi_step=MultiStepInput(COUNT, NO_ENDS)))
    assert isinstance(found, StepOutput)
    assert found.decoded is not None
    assert np.array_equal(found.decoded, np.stack(expected[1:], axis=1))
    assert np.array_equal(found.target_tokens, expected[1])
    assert torch.equal(one.kv.data, several.kv.data)


class ReadingHead:
    """A head that only keeps what it is given to read."""

    name = "head"
    kv_bytes = 0

    def __init__(self) -> None:
        self.texts: list[TextRows] = []
        self.features: list[Tensor] = []

    def reset(self) -> None:
        """Nothing."""

    def move(self, moves: Int32) -> None:
        """Nothing."""

    def overwritten(self, slots: Int32) -> None:
        """Nothing."""

    def release(self) -> None:
        """Nothing."""

    def read_later(self, texts: TextRows, features: Tensor) -> None:
        """Keep both."""
        self.texts.append(texts)
        self.features.append(features)

    def draft(
        self, step: StepInput, texts: TextRows, features: Tensor, task: HeadTask
    ) -> HeadDrafts:
        """Never called: the steps' tasks are of no request."""
        raise AssertionError


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("feature_layers", [(3,), (1, 2), (-1, 0, 3)])
def test_heads_read_the_states_of_single_steps(
    feature_layers: tuple[int, ...], top_k: int, tmp_path: Path
) -> None:
    """Also those between two layers; by the operator, and pass by pass."""
    save_tiny_model("llama", tmp_path)
    assert KINDS["llama"].config().num_hidden_layers == 4
    one, head = prompted_stage(tmp_path, "llama", feature_layers), ReadingHead()
    several = prompted_stage(tmp_path, "llama", feature_layers, lambda _: [head])

    def step_of(tokens: Int32, num_before: int) -> StepInput:
        step = decoding_step(tokens, num_before, 1.5)
        return replace(step, sampling=replace(step.sampling, top_k=np.full(3, top_k, "i4")))

    tokens = np.array([prompt[-1] for prompt in PROMPTS], dtype=np.int32)
    step, expected, decoded = step_of(tokens, 0), [], []
    for index in range(COUNT):
        own = replace(step_of(tokens, index), heads=HeadInput(feature_requests=(0, 1, 2)))
        output = one.run(own)
        assert isinstance(output, StepOutput)
        assert output.features is not None
        tokens = output.target_tokens
        decoded.append(tokens)
        expected.append(output.features)
    tasks = (HeadTask("head", (), (), ()),)
    several.run(
        replace(
            step, multi_step=MultiStepInput(COUNT, NO_ENDS), heads=HeadInput(tasks=tasks),
            request_keys=(7, 8, 9),
        )
    )  # fmt: skip
    # A step without a task is the end of what waits.
    several.run(step_of(tokens, COUNT))
    [texts], [features] = head.texts, head.features
    assert texts.keys == COUNT * (7, 8, 9)
    assert np.array_equal(texts.following, np.concatenate(decoded))
    assert np.array_equal(features.numpy(), np.concatenate(expected))


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_step_ends_with_the_last_answer(top_k: int, tmp_path: Path) -> None:
    """By the operator, and pass by pass where tokens are chosen otherwise."""
    save_tiny_model("llama", tmp_path)
    last = np.array([prompt[-1] for prompt in PROMPTS], dtype=np.int32)
    step = decoding_step(last, 0, 1.5)
    step = replace(step, sampling=replace(step.sampling, top_k=np.full(3, top_k, "i4")))

    def decoded(ends: list[list[int]]) -> Int32:
        stage = prompted_stage(tmp_path, "llama")
        wanted = MultiStepInput(COUNT, np.array(ends, dtype=np.int32))
        found = stage.run(replace(step, multi_step=wanted))
        assert isinstance(found, StepOutput)
        assert found.decoded is not None
        return found.decoded

    whole = decoded([[-1]] * 3)
    assert whole.shape == (3, COUNT)
    # One of them has no end.
    assert np.array_equal(decoded([[whole[0, 0], -1], [whole[1, 2], 5], [-1, -1]]), whole)
    ends = [[-1, whole[0, 0]], [whole[1, 2], -1], [whole[2, 1], -1]]
    firsts = [whole[row].tolist().index(max(own)) for row, own in enumerate(ends)]
    assert np.array_equal(decoded(ends), whole[:, : max(firsts) + 1])


def test_a_part_of_a_model_decodes_one(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    layers = KINDS["llama"].config().num_hidden_layers
    options = StageOptions(compile="auto", compile_cache=str(FOLDER))
    for span in (LayerSpan(0, 1, layers), LayerSpan(1, layers, layers)):
        stage = load_stage(tmp_path, span, 60, BLOCK_SIZE, options=options)
        assert isinstance(stage.path, CpuPath)
        assert not stage.decodes_several


def test_torchs_operators_decode_one(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    layers = KINDS["llama"].config().num_hidden_layers
    options = StageOptions(compile="off")
    stage = load_stage(tmp_path, LayerSpan(0, layers, layers), 60, BLOCK_SIZE, options=options)
    assert not stage.decodes_several


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("top_k", [0, 50])
def test_a_pass_that_is_not_finite_is_told_with_the_step_that_begins_with_it(
    temperature: float, top_k: int, tmp_path: Path
) -> None:
    """By the operator, and pass by pass where tokens are filtered."""
    stage = prompted_stage(save_tiny_model("qwen2", tmp_path), "qwen2")
    last = np.array([prompt[-1] for prompt in PROMPTS], dtype=np.int32)

    def decoded(tokens: Int32, num_before: int) -> StepOutput:
        step = decoding_step(tokens, num_before, temperature)
        sampling = replace(step.sampling, top_k=step.sampling.top_k + np.int32(top_k))
        step = replace(step, sampling=sampling, multi_step=MultiStepInput(COUNT, NO_ENDS))
        output = stage.run(step)
        assert isinstance(output, StepOutput)
        assert output.decoded is not None
        return output

    whole = decoded(last, 0).decoded
    assert whole is not None
    # The last of the first request's tokens that comes no earlier in any text.
    said = whole[0].tolist()
    bad = next(i for i in range(1, COUNT) if said[i] not in {*said[:i], *whole[1:, : i + 1].flat})
    embed = stage.path.part.embed
    assert isinstance(embed, torch.nn.Embedding)
    embed.weight.data[said[bad]] = torch.nan
    output = decoded(last, 0)
    assert output.not_finite is None
    assert np.array_equal(output.decoded, whole[:, : bad + 1])
    output = decoded(whole[:, bad].copy(), bad + 1)
    assert output.not_finite is not None
    assert output.not_finite.tolist() == [0]
    assert output.decoded is not None
    assert output.decoded.shape == (3, 1)
    assert np.array_equal(output.decoded[1:], whole[1:, bad + 1 : bad + 2])
