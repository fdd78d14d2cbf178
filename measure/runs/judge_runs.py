"""Explains differing answers of matched runs: whether float rounding is the reason."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ...cluster.config import EngineConfig
from ...cluster.engine.assembly import plan_model
from ...core.request.sampling_params import SamplingParams
from ...models.load.checkpoint import resolve_model_path
from .equality import Explain
from .matched import Plan
from .near_tie import Judge


def explain_by_model(model: str, plan: Plan, tokenizer: PreTrainedTokenizerBase) -> Explain:
    """A function that explains differences by `model` itself, run in transformers in float32.

    The model is loaded when the first answer differs.
    """

    @cache
    def judge() -> Judge:
        path = resolve_model_path(model)
        # SDPA knows no soft cap, which transformers 5.17 overlooks in Gemma 2.
        target = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        return Judge(target.eval(), plan_model(EngineConfig(model=model)).request_factory())

    def explain(index: int, expected: Sequence[int], found: Sequence[int]) -> tuple[str, bool]:
        length = min(len(expected), len(found))
        if tuple(expected[:length]) == tuple(found[:length]):
            return "one answer ends before the other", True
        prompt = tokenizer(plan.prompts[index].text)["input_ids"]
        params = SamplingParams(temperature=plan.temperature, seed=plan.seed + index)
        [parting] = judge().partings([prompt], [expected[:length]], [found[:length]], params)
        kind = "near-tie" if parting.is_near_tie else "NO NEAR-TIE"
        return f"{kind}: gap {parting.gap:.1e}", not parting.is_near_tie

    return explain
