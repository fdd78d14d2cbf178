"""Text to token ids and back, with the errors that a client should see."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..models.text.chat_template import ChatOptions, ChatTemplate
from ..models.token_bytes import TokenBytes
from .errors import bad_request

# Above this many characters encoding takes milliseconds and must not hold up other streams.
INLINE_CHARS = 20_000
# The same for templates, which take microseconds a message.
INLINE_MESSAGES = 32
TEMPLATE_TIMEOUT_S = 10.0


class TextCodec:
    """A transformers tokenizer behind the API's routes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bytes_of = TokenBytes(tokenizer)
        self.template = ChatTemplate(tokenizer)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The special tokens, which have no text unless it is asked for, by their spelling."""
        ids = dict(
            zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True)
        )
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return ids | {token.content: key for key, token in added.items() if token.special}

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of `text`; `special` adds the model's own special tokens."""
        if len(text) <= INLINE_CHARS:
            return self._encode(text, special)
        return await asyncio.to_thread(self._encode, text, special)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """The text of a chat. Raises `RequestError` as `ChatTemplate.render` does."""
        if _is_short(messages, options):
            return self.template.render(messages, options)
        return await asyncio.to_thread(
            self.template.render, messages, options, timeout_s=TEMPLATE_TIMEOUT_S
        )

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> tuple[int, ...]:
        """Token ids of a chat. Raises `RequestError` as `ChatTemplate.render` does."""
        text = await self.render_chat(messages, options or ChatOptions())
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


def _is_short(messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> bool:
    """Whether the template takes well under a millisecond; a client's own one never counts so."""
    if len(messages) > INLINE_MESSAGES or options.template is not None:
        return False
    if options.tools or options.documents or options.variables:
        return False
    if any(not message.keys() <= {"role", "content", "name"} for message in messages):
        return False
    return sum(len(message["content"]) for message in messages) <= INLINE_CHARS
