"""transformers' own decoding, plain and with its own kinds of speculation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ..models.bundled import demo_path
from ..models.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class PeerOutput:
    """New tokens, and how often the target ran, the prompt's pass included."""

    token_ids: tuple[int, ...]
    passes: int


class TransformersPeer:
    """A bundled target and its assistant in float32."""

    def __init__(self, target: str, assistant: str) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._tokenizer = load_tokenizer(target)
        self.target = _load(target)
        self.assistant = _load(assistant)
        self._passes = 0
        self.target.register_forward_pre_hook(self._count)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return list(self._tokenizer(text)["input_ids"])

    @torch.inference_mode()
    def generate(
        self, prompt: list[int], num_tokens: int, options: Mapping[str, Any]
    ) -> PeerOutput:
        """Exactly `num_tokens` greedy tokens; `options` go to `generate`."""
        self._passes = 0
        ids = torch.tensor([prompt])
        # Its declared type is that of any attribute of a module.
        generate: Any = self.target.generate
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
        return PeerOutput(tuple(output[0, len(prompt) :].tolist()), self._passes)

    def _count(self, *_: object) -> None:
        self._passes += 1


def _load(name: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(demo_path(name), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()
