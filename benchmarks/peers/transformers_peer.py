"""transformers' own decoding, plain and with its own kinds of speculation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from ...models.load.checkpoint import resolve_model_path


@dataclass(frozen=True, slots=True)
class PeerOutput:
    """New tokens, and how often the target ran, the prompt's pass included."""

    token_ids: tuple[int, ...]
    passes: int


class TransformersPeer:
    """A target in float32.

    ends  answers end at the model's end token, which stays in them; else they go on behind it
    """

    def __init__(self, target: str, *, ends: bool = False) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            resolve_model_path(target), dtype=torch.float32
        )
        end = model.generation_config.eos_token_id if ends else None
        self._ends: list[int] = end if isinstance(end, list) else [end] if end is not None else []
        model.generation_config.eos_token_id = self._ends or None
        self.target: PreTrainedModel = model.eval()
        self._passes = 0
        self.target.register_forward_pre_hook(self._count)

    def generate(
        self, prompt: list[int], num_tokens: int, options: Mapping[str, Any]
    ) -> PeerOutput:
        """At most `num_tokens` greedy tokens; `options` go to `generate`."""
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
            **{"do_sample": False, "max_new_tokens": num_tokens, "pad_token_id": 0, **options},
        )
        return [PeerOutput(self._ended(row[width:].tolist()), self._passes) for row in output]

    def _ended(self, tokens: list[int]) -> tuple[int, ...]:
        """Without the padding behind an end token."""
        ends = [place for place, token in enumerate(tokens) if token in self._ends]
        return tuple(tokens[: ends[0] + 1] if ends else tokens)

    def _count(self, *_: object) -> None:
        self._passes += 1
