"""transformers' own decoding, plain and with its own kinds of speculation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ...models.load.checkpoint import resolve_model_path
from ...models.text.tokenizer import load_tokenizer


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

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer."""
        return str(self._tokenizer.decode(list(token_ids)))

    def generate(
        self, prompt: list[int], num_tokens: int, options: Mapping[str, Any]
    ) -> PeerOutput:
        """Exactly `num_tokens` greedy tokens; `options` go to `generate`."""
        (output,) = self.generate_batch([prompt], num_tokens, options)
        return output

    @torch.inference_mode()
    def generate_batch(
        self, prompts: Sequence[list[int]], num_tokens: int, options: Mapping[str, Any]
    ) -> list[PeerOutput]:
        """The same for several prompts together, padded at the left; each counts every pass."""
        self._passes = 0
        width = max(map(len, prompts))
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        # Its declared type is that of any attribute of a module.
        generate: Any = self.target.generate
        output = generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
        return [PeerOutput(tuple(row[width:].tolist()), self._passes) for row in output]

    def _count(self, *_: object) -> None:
        self._passes += 1


def _load(name: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(resolve_model_path(name), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()
