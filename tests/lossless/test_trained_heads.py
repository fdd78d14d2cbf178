"""Drafters that were trained for a few steps draft through an engine, and change no token."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.deploy.cli.train.fit import head_config
from draftline.deploy.cli.train.job import HeadJob
from draftline.deploy.cli.train.recipes import head_plan, head_recipe
from draftline.deploy.cli.train.student import student_config
from draftline.models.load.bundled import demo_path
from draftline.models.text.tokenizer import load_tokenizer
from draftline.training.heads.distilled_texts import DistilledText
from draftline.training.heads.export import export_head, export_student
from draftline.training.heads.student import Student
from draftline.training.heads.trainer import HELD_OUT_TEXTS, train_head

STEPS = 12
# Of a prompt, tokens that are trained with.
PROMPT = 24
PROMPTS = [prompt.text for prompt in held_out_prompts()[:6]]
KINDS = {
    "eagle3": {"draft_vocab_size": 300, "num_passes": 2, "share_output_head": True},
    "griffin": {"draft_vocab_size": 300, "num_passes": 2},
    "dspark": {"num_anchors": 8, "num_layers": 1},
    "p_eagle": {"draft_length": 4, "num_layers": 1},
}


@cache
def texts_of(model: str) -> list[DistilledText]:
    """What a bundled target says."""
    with Engine(EngineConfig(model=model)) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=24)
        said = engine.generate(PROMPTS, params)
    return [
        DistilledText(
            (*one.prompt_token_ids[-24:], *one.token_ids), ((24, 24 + len(one.token_ids)),)
        )
        for one in said
    ] * (HELD_OUT_TEXTS // len(PROMPTS) + 2)


@pytest.mark.parametrize(
    ("kind", "stages", "model"),
    [
        ("eagle3", 1, "demo"),
        ("griffin", 2, "demo"),
        ("dspark", 2, "demo"),
        ("p_eagle", 1, "demo"),
        ("griffin", 2, "demo-hybrid"),
    ],
)
def test_trained_drafts_are_accepted_and_change_nothing(
    tmp_path: Path, kind: str, stages: int, model: str
) -> None:
    """A few prompts learned by heart, so that some drafts are right and others are not."""
    texts = texts_of(model)
    job = HeadJob(
        texts=Path(), output=tmp_path / "head", num_steps=STEPS, texts_per_step=6, peak_lr=3e-3,
        **KINDS[kind],
    )  # fmt: skip
    target, recipe = demo_path(model), head_recipe(kind, job)
    config = head_config(target, kind, job, texts)
    head = train_head(
        config, target, texts, head_plan(job, recipe, config.hidden_size), tmp_path / "run"
    )
    export_head(head, job.output, {"architectures": [recipe.architecture]}, {})
    options = {"min_confidence": 0.05} if kind == "dspark" else {}
    drafter = DrafterConfig(kind="head", model=str(job.output), top_k=3, **options)
    assert_accepted_and_lossless(drafter, stages, model)


def test_a_distilled_models_drafts_are_accepted_and_change_nothing(tmp_path: Path) -> None:
    """Of two of the target's six layers."""
    texts = texts_of("demo")
    job = HeadJob(
        texts=Path(), output=tmp_path / "student", layers="0,5", num_steps=STEPS, texts_per_step=6,
        peak_lr=3e-3, window=PROMPT + 24,
    )  # fmt: skip
    target = demo_path("demo")
    config = student_config(target, job, texts)
    plan = head_plan(job, head_recipe("model", job), 256)
    student = train_head(config, target, texts, plan, tmp_path / "run")
    assert isinstance(student, Student)
    export_student(student, job.output, load_tokenizer(target), {})
    drafter = DrafterConfig(kind="model", model=str(job.output), vocabulary="same")
    assert_accepted_and_lossless(drafter, stages=2)


def assert_accepted_and_lossless(drafter: DrafterConfig, stages: int, model: str = "demo") -> None:
    engine_config = EngineConfig(
        model=model, drafters=(drafter,), node_budget="full", pipeline_parallel_size=stages
    )
    with Engine(engine_config) as engine:
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=24)
            plain = engine.generate(PROMPTS, params, options=RequestOptions(speculative=False))
            drafted = engine.generate(PROMPTS, params)
            assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
            tokens = sum(len(one.token_ids) for one in drafted)
            steps = sum(len(one.metrics.accepted_lengths) for one in drafted)
            assert steps < tokens, "some drafts were accepted"
            assert sum(one.metrics.num_draft_tokens for one in drafted) > tokens - steps
