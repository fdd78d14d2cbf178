"""Finds how to read a head whose config.json leaves it open, from a few answers of the target."""

# ruff: noqa: PLC0415 - the command line's help must not wait for torch

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.arrays import Float32
from ...core.proposals import Commit, DraftRequest, FeatureRows, Query
from .demo.prompts import held_out_prompts

if TYPE_CHECKING:
    from ...drafters.heads.reading_trial import ProbingDrafter

NUM_PROMPTS, NUM_TOKENS = 6, 40
# A chain's draft of the most levels that heads are asked for by default.
MAX_NODES = 8


def probe_head(folder: Path, model: str) -> dict[str, float]:
    """Mean accepted tokens of a draft by reading, the best first; empty if the config.json leaves
    nothing open.

    Loads the target. Raises `CheckpointError` or `ConfigError`.
    """
    from ...drafters.heads.drafter import load_head_drafter
    from ...drafters.heads.options import HeadOptions
    from ...drafters.heads.reading_trial import ProbingDrafter
    from ...models.load.model_info import read_model_info

    target = read_model_info(model)
    drafter = load_head_drafter(folder, target, options=HeadOptions(tree="chain"))
    if not isinstance(drafter, ProbingDrafter):
        return {}
    for name, (tokens, num_prompt, states) in enumerate(
        _answers(target.path, drafter.feature_layers.layers)
    ):
        follow(drafter, str(name), tokens, num_prompt, states)
    return drafter.acceptance


def follow(
    drafter: ProbingDrafter, name: str, tokens: Sequence[int], num_prompt: int, states: Float32
) -> None:
    """Let a head draft behind each token of an answer.

    tokens  of the prompt, `num_prompt` of them, and the answer
    states  float32 [tokens, width]  that the head reads
    """
    text = np.array(tokens, dtype=np.int32)
    drafter.open(DraftRequest(name, text[:num_prompt], num_prompt, 0.0, 0))
    drafter.observe_features([FeatureRows(name, 0, states[: num_prompt - 1])])
    for length in range(num_prompt, len(text)):
        drafter.propose([Query(name, length, MAX_NODES)])
        drafter.observe_features([FeatureRows(name, length - 1, states[length - 1 : length])])
        drafter.observe([Commit(name, length, text[length : length + 1])])
    drafter.close(name)


def _answers(path: Path, layers: Sequence[int]) -> list[tuple[list[int], int, Float32]]:
    """Tokens of greedy answers, how many of them are the prompt's, and states of the layers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ...models.device import choose_device

    device = choose_device("auto")
    # Its stubs type neither `to` nor `generate`.
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(path, dtype="auto").eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    answers = []
    for prompt in held_out_prompts(NUM_PROMPTS):
        ids = tokenizer(prompt.text, return_tensors="pt").input_ids.to(device)
        with torch.inference_mode():
            said = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False,
                max_new_tokens=NUM_TOKENS,
            )  # fmt: skip
            states = model.base_model(said, output_hidden_states=True).hidden_states
        # What enters layer k is the output of layer k - 1; the last one's is normed.
        rows = torch.cat([states[layer + 1][0] for layer in layers], dim=-1).float().cpu().numpy()
        answers.append((said[0].tolist(), ids.shape[1], rows))
    return answers
