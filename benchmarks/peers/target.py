"""The model that all servers serve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...measure.clients.engine_endpoint import prompt_ids
from ...measure.prompts import BenchPrompt
from ...models.load.bundled import BUNDLED_NAMES, demo_path
from ...models.load.checkpoint import answers_chats, read_config, resolve_model_path
from ...models.text.tokenizer import load_tokenizer

MAX_MODEL_LEN = 1024
MAX_SEQS = 64
BYTES_PER_FLOAT = 4
# Of the slowest server here, on one thread of a cloud machine: a pass takes `STEP_S` and the time
# in which the weights are read.
STEP_S, BYTES_PER_S = 5e-3, 1e10


@dataclass(frozen=True)
class Target:
    """A model by its name, as `draftline serve` takes it."""

    name: str

    @cached_property
    def folder(self) -> Path:
        """Its files."""
        return resolve_model_path(self.name)

    @property
    def is_bundled(self) -> bool:
        """Whether it comes with draftline, and with it a small model and a retrieval store."""
        return self.name in BUNDLED_NAMES

    @property
    def assistant(self) -> Path | None:
        """A small model with the same tokenizer."""
        return demo_path("demo-drafter") if self.is_bundled else None

    @cached_property
    def is_chat(self) -> bool:
        """Whether it is asked in chats."""
        return answers_chats(self.name)

    @property
    def kv_gib(self) -> int:
        """Space of the float32 keys and values of all requests at their longest."""
        config = read_config(self.folder)
        heads, hidden = config.num_attention_heads, config.hidden_size
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
        return math.ceil(MAX_SEQS * MAX_MODEL_LEN * of_token * BYTES_PER_FLOAT / 2**30)

    @property
    def seconds_a_pass(self) -> float:
        """About how long a pass over one token takes."""
        weights = sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))
        return STEP_S + weights / BYTES_PER_S

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizer = load_tokenizer(self.name)
        # The tokenizer warns of each text that its model cannot read: they are left out here.
        tokenizer.model_max_length = 10**9
        return tokenizer

    def prompt_ids(self, text: str) -> list[int]:
        """Tokens of a prompt, or of a chat that begins with it."""
        return prompt_ids(self._tokenizer, BenchPrompt("", text).asked(is_chat=self.is_chat))

    def decode(self, token_ids: list[int]) -> str:
        """The text of an answer."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
