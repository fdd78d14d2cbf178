"""Answers of a checkpoint: transformers' own, and an engine's with and without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.core.request.sampling_params import RequestOptions
from transformers import AutoModelForCausalLM

PROMPTS = ([5, 9, 33, 17, 5, 9, 33, 17, 5, 9], [70, 2, 41, 8, 70, 2, 41])
NUM_TOKENS = 24


@torch.inference_mode()
def by_transformers(folder: Path, auto: Any = AutoModelForCausalLM) -> list[list[int]]:
    """The answers to `PROMPTS`, token by token, each by the whole text."""
    model = auto.from_pretrained(folder, attn_implementation="eager").eval()
    answers = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(NUM_TOKENS):
            text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
        answers.append(text[len(prompt) :])
    return answers


def by_engine(
    folder: Path, num_stages: int = 1, temperature: float = 0.0, **settings: Any
) -> list[list[int]]:
    """The same by an engine that drafts, which must say the same without drafts.

    The folder needs a tokenizer. Above temperature 0 answers are drawn with a seed.
    """
    config = EngineConfig(
        model=str(folder), drafters=(DrafterConfig(kind="prompt_lookup"),), node_budget="full",
        pipeline_parallel_size=num_stages, **settings,
    )  # fmt: skip
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    with Engine(config) as engine:
        drafted, plain = (
            [list(one.token_ids) for one in engine.generate(PROMPTS, params, options)]
            for options in (None, RequestOptions(speculative=False))
        )
    assert drafted == plain
    return drafted
