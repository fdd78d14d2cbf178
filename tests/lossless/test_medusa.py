"""Heads that tell several tokens ahead tell the right ones: a hand-made target counts upwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.output import RequestOutput
from draftline.models.load.bundled import demo_path
from support.inputs import medusa_checkpoints as medusa
from torch import Tensor

NUM_HEADS, NUM_TOKENS = 4, 41
PROMPTS = ["def add(a, b):", "x = 1\nfor y in range(9):", "class Tree:\n"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    folder = tmp_path_factory.mktemp("counting")
    return folder, medusa.save_counting_target(folder, demo_path("demo"))


def answers(model: Path, *drafters: DrafterConfig, **settings: Any) -> list[RequestOutput]:
    config = EngineConfig(
        model=str(model), drafters=drafters, node_budget="full", dtype="float32", **settings
    )
    with Engine(config) as engine:
        return engine.generate(
            PROMPTS, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        )


def check_counts(outputs: list[RequestOutput], vocab_size: int) -> None:
    for one in outputs:
        text = [one.prompt_token_ids[-1], *one.token_ids]
        assert [(token + 1) % vocab_size for token in text[:-1]] == text[1:]


@pytest.mark.parametrize(
    ("tree", "stages"),
    [
        ("chain", 1),
        ("dynamic", 2),
        ("choices", 1),
        pytest.param("chain", 2, marks=pytest.mark.full),
        pytest.param("dynamic", 1, marks=pytest.mark.full),
        pytest.param("choices", 2, marks=pytest.mark.full),
    ],
)
def test_every_level_tells_its_own_token(
    target: tuple[Path, Tensor], tmp_path: Path, tree: str, stages: int
) -> None:
    """All nodes of the right path are accepted in every step; a place beside it, none would be."""
    folder, units = target
    head = medusa.save_counting_medusa(tmp_path / "head", units, NUM_HEADS)
    if tree == "choices":
        # As Medusa's files list them, with ranks that are never right.
        choices = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]
        (tmp_path / "choices.json").write_text(json.dumps(choices))
        tree = str(tmp_path / "choices.json")
    drafter = DrafterConfig(kind="head", model=str(head), tree=tree, num_tokens=6)
    outputs = answers(folder, drafter, pipeline_parallel_size=stages)
    check_counts(outputs, len(units))
    for one in outputs:
        lengths = one.metrics.accepted_lengths
        # The first step has the prompt's states; in the last one there is no room for more.
        assert set(lengths[:-1]) == {NUM_HEADS}, lengths
        assert len(lengths) == (NUM_TOKENS - 1) // (NUM_HEADS + 1)


@pytest.mark.parametrize("late", [-1, 1])
def test_heads_of_the_token_beside_are_never_accepted(
    target: tuple[Path, Tensor], tmp_path: Path, late: int
) -> None:
    folder, units = target
    head = medusa.save_counting_medusa(tmp_path / "head", units, NUM_HEADS, late)
    outputs = answers(folder, DrafterConfig(kind="head", model=str(head), tree="chain"))
    check_counts(outputs, len(units))
    assert not any(length for one in outputs for length in one.metrics.accepted_lengths)
