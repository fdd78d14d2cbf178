"""Drafts of another tokenizer beside those of transformers' universal assisted generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from draftline.core.proposals import DraftRequest, Query
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.drafters.model.drafter import load_model_drafter
from draftline.drafters.model.options import ModelOptions
from draftline.models.load.bundled import demo_path
from draftline.models.load.model_info import read_model_info
from draftline.models.text.tokenizer import load_tokenizer
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import (
    AssistantToTargetTranslator,
    AssistedCandidateGeneratorDifferentTokenizers,
    UniversalSpeculativeDecodingGenerator,
)

OTHER = "demo-drafter-other-vocab"
NUM_TOKENS = 4
Candidates = Callable[[torch.Tensor], list[int]]


def load(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_path(name), dtype=torch.float32).eval()


def of_transformers(vocabulary: str, num_draws: int) -> Candidates:
    """What a new generator of candidates says after a text, greedily."""
    target = load_tokenizer(demo_path("demo"))
    own = load_tokenizer(demo_path(OTHER))

    def candidates(ids: torch.Tensor) -> list[int]:
        assistant = load(OTHER)
        config = assistant.generation_config
        config.num_assistant_tokens = num_draws
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        config.do_sample, config.min_length, config.max_length = False, 0, 512
        given: dict[str, Any] = {
            "input_ids": ids, "assistant_model": assistant, "target_tokenizer": target,
            "assistant_tokenizer": own, "generation_config": config, "model_kwargs": {},
        }  # fmt: skip
        if vocabulary == "slem":
            generator: Any = AssistedCandidateGeneratorDifferentTokenizers(**given)
        else:
            translator = AssistantToTargetTranslator(
                target, own, len(target), assistant_model=assistant, assistant_prune_lm_head=False
            )
            generator = UniversalSpeculativeDecodingGenerator(**given, atm_translator=translator)
        found, _ = generator.get_candidates(ids)
        return found[0, ids.shape[1] :].tolist()

    return candidates


def right(drafted: list[int], said: list[int]) -> int:
    """Drafted tokens that the target says, up to the first that it does not."""
    pairs = enumerate(zip(drafted, said, strict=False))
    most = min(len(drafted), len(said))
    return next((place for place, (one, other) in pairs if one != other), most)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("vocabulary", ["slem", "tli"])
def test_the_same_tokens_are_accepted(vocabulary: str) -> None:
    options = ModelOptions(vocabulary=vocabulary, num_tokens=NUM_TOKENS)
    drafter = load_model_drafter(OTHER, options=options, target=read_model_info("demo"))
    # Of the target's tokens, or as many of its own as write so many.
    num_draws = NUM_TOKENS if vocabulary == "tli" else 6
    theirs = of_transformers(vocabulary, num_draws)
    target, tokenizer = load("demo"), load_tokenizer(demo_path("demo"))
    accepted: list[tuple[int, int]] = []
    for prompt in held_out_prompts(16):
        ids = tokenizer(prompt.text, return_tensors="pt")["input_ids"][:, :80]
        said = target.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
        tokens = np.array(ids[0].tolist(), dtype=np.int32)
        drafter.open(DraftRequest(prompt.name, tokens, len(tokens), 0.0, seed=0))
        [own] = drafter.propose([Query(prompt.name, len(tokens), 8)])
        accepted.append((right(own.tokens.tolist(), said), right(theirs(ids), said)))
    ours, others = map(sum, zip(*accepted, strict=True))
    assert others > 0
    same = sum(one == other for one, other in accepted)
    # With tli they encode a prompt's text anew, here its shared tokens stay as they are.
    assert same >= (14 if vocabulary == "slem" else 12), accepted
    assert ours >= others - (0 if vocabulary == "slem" else 3), accepted
