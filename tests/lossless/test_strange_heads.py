"""A head that was trained for nothing is reported and left out; answers stay the target's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.cluster.drafting.head_watch import NUM_DRAFTS
from draftline.cluster.pipeline.local_pipeline import LocalPipeline
from draftline.core.request.sampling_params import RequestOptions
from draftline.core.steps import StepInput
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.models.heads.load_head import build_head
from draftline.models.heads.medusa import MedusaConfig
from draftline.models.load.model_info import read_model_info
from draftline.training.heads.export import export_head


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Medusa's heads for the demo target, with random weights."""
    torch.manual_seed(4)
    info = read_model_info("demo")
    vocab = info.vocab_size
    head = build_head(MedusaConfig(info.hidden_size, 4, vocab, draft_vocab_size=vocab))
    folder = tmp_path_factory.mktemp("strange")
    export_head(head, folder, {}, {})
    return folder


@pytest.fixture
def handed_out(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step, whether it hands out states, or a head reads them in the last stage."""
    steps: list[bool] = []
    submit = LocalPipeline.submit

    def noted(self: LocalPipeline, step: StepInput) -> Any:
        steps.append(bool(step.heads.feature_requests) or bool(step.heads.tasks))
        return submit(self, step)

    monkeypatch.setattr(LocalPipeline, "submit", noted)
    return steps


def answer(engine: Engine, *, is_plain: bool = False) -> list[tuple[int, ...]]:
    """Of six prompts; more steps together than a head's first drafts."""
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=60, ignore_eos=True)
    prompts = [prompt.text for prompt in held_out_prompts()[:6]]
    outputs = engine.generate(prompts, params, RequestOptions(speculative=not is_plain))
    return [one.token_ids for one in outputs]


@pytest.mark.parametrize("placement", ["last_stage", pytest.param("actor", marks=pytest.mark.full)])
def test_a_random_head_is_left_out(
    strange: Path, handed_out: list[bool], caplog: pytest.LogCaptureFixture, placement: str
) -> None:
    head = DrafterConfig(kind="head", model=str(strange), placement=placement)
    drafters = (head, DrafterConfig(kind="suffix"))
    config = EngineConfig(model="demo", drafters=drafters, node_budget="full")
    with Engine(config) as engine, caplog.at_level(logging.WARNING):
        plain = answer(engine, is_plain=True)
        assert not any(handed_out) or placement == "last_stage"
        assert answer(engine) == plain
        [head, suffix] = engine.stats().drafters
        assert (head.left_out, suffix.left_out) == (True, False)
        [record] = [one for one in caplog.records if "event=left_out" in one.getMessage()]
        # As many more as the last step had requests.
        drafts = int(record.getMessage().split("drafts=")[1].split()[0])
        assert NUM_DRAFTS <= drafts < NUM_DRAFTS + 6
        assert str(strange) in record.getMessage()
        assert "trained for demo" in record.getMessage()
        assert any(handed_out)
        # From now on nothing is computed or sent for it, and it is asked for nothing.
        handed_out.clear()
        assert answer(engine) == plain
        assert not any(handed_out)
        assert engine.stats().drafters[0].messages == head.messages
        assert engine.stats().drafters[1].proposals > suffix.proposals


def test_the_bundled_head_belongs_to_its_model(
    handed_out: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    drafters = (DrafterConfig(kind="head", model="demo-griffin"),)
    config = EngineConfig(model="demo", drafters=drafters, node_budget="full")
    with Engine(config) as engine, caplog.at_level(logging.WARNING):
        for _ in range(3):
            answer(engine)
        [head] = engine.stats().drafters
        assert head.proposals > NUM_DRAFTS
        assert (head.left_out, head.connected) == (False, True)
        assert not [one for one in caplog.records if "left_out" in one.getMessage()]
        handed_out.clear()
        answer(engine)
        assert any(handed_out)


def test_a_budget_that_chooses_finds_it_out_too(
    strange: Path, handed_out: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    """Though it would soon have left the head alone, without a word."""
    drafters = (DrafterConfig(kind="head", model=str(strange)),)
    config = EngineConfig(model="demo", drafters=drafters)
    with Engine(config) as engine, caplog.at_level(logging.WARNING):
        plain = answer(engine, is_plain=True)
        assert answer(engine) == plain
        assert engine.stats().drafters[0].left_out
        assert sum("event=left_out" in one.getMessage() for one in caplog.records) == 1
        handed_out.clear()
        assert answer(engine) == plain
        assert not any(handed_out)
