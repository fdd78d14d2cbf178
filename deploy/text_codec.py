"""Text to token ids and back, with the errors that a client should see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jinja2 import TemplateError

from ..cluster.loop_calls import off_loop
from ..models.token_bytes import TokenBytes
from .errors import bad_request

T = TypeVar("T")

# Above so many characters or tokens, work takes milliseconds and must not hold up other streams.
INLINE_CHARS = 4_000
INLINE_TOKENS = 2_000
INLINE_MESSAGES = 32


class TextCodec:
    """A transformers tokenizer behind the API's routes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bytes_of = TokenBytes(tokenizer)

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of `text`; `special` adds the model's own special tokens."""
        return (await self.encode_all([text], special=special))[0]

    async def encode_all(
        self, texts: Sequence[str], *, special: bool = True
    ) -> list[tuple[int, ...]]:
        """Token ids of each text."""
        is_short = sum(map(len, texts)) <= INLINE_CHARS

        def encode() -> list[tuple[int, ...]]:
            return [tuple(self.tokenizer.encode(one, add_special_tokens=special)) for one in texts]

        return await _run(encode, is_short)

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

        def render() -> str:
            return self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=generate, tokenize=False
            )

        num_chars = sum(len(message["content"]) for message in messages)
        is_short = len(messages) <= INLINE_MESSAGES and num_chars <= INLINE_CHARS
        try:
            text = await _run(render, is_short)
        except TemplateError as error:
            raise bad_request("messages", f"the chat template refuses them: {error}") from error
        return await self.encode(text, special=False)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included. Raises `ApiError` 400 for unknown ids."""

        def decode() -> str:
            self._check(token_ids)
            return self.tokenizer.decode(list(token_ids))

        return await _run(decode, len(token_ids) <= INLINE_TOKENS)

    async def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token."""

        def spell() -> list[str]:
            self._check(token_ids)
            return self.tokenizer.convert_ids_to_tokens(list(token_ids))

        return await _run(spell, len(token_ids) <= INLINE_TOKENS)

    def _check(self, token_ids: Sequence[int]) -> None:
        size = len(self.tokenizer)
        unknown = next((token_id for token_id in token_ids if token_id >= size), None)
        if unknown is not None:
            raise bad_request("tokens", f"{unknown} is not a token id; the last one is {size - 1}")


async def _run(work: Callable[[], T], is_short: bool) -> T:
    return work() if is_short else await off_loop(work)
