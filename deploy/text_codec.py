"""Text to token ids and back, with the errors that a client should see."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from ..models.token_bytes import TokenBytes
from .errors import bad_request

# Above this many characters encoding takes milliseconds and must not hold up other streams.
INLINE_CHARS = 20_000


class TextCodec:
    """A transformers tokenizer behind the API's routes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bytes_of = TokenBytes(tokenizer)

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of `text`; `special` adds the model's own special tokens."""
        if len(text) <= INLINE_CHARS:
            return self._encode(text, special)
        return await asyncio.to_thread(self._encode, text, special)

    async def encode_chat(
        self, messages: Sequence[dict[str, str]], *, generate: bool = True
    ) -> tuple[int, ...]:
        """Token ids of a chat; `generate` opens the assistant's answer.

        Raises `ApiError` 400 if the model has no chat template or its template refuses the chat.
        """
        if not self.tokenizer.chat_template:
            raise bad_request(
                "messages", "this model has no chat template; use /v1/completions with a prompt"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=generate, tokenize=False
            )
        except TemplateError as error:
            raise bad_request("messages", f"the chat template refuses them: {error}") from error
        return await self.encode(text, special=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included. Raises `ApiError` 400 for unknown ids."""
        self._check(token_ids)
        return self.tokenizer.decode(list(token_ids))

    def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token."""
        self._check(token_ids)
        return self.tokenizer.convert_ids_to_tokens(list(token_ids))

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=special))

    def _check(self, token_ids: Sequence[int]) -> None:
        size = len(self.tokenizer)
        unknown = next((token_id for token_id in token_ids if token_id >= size), None)
        if unknown is not None:
            raise bad_request("tokens", f"{unknown} is not a token id; the last one is {size - 1}")
