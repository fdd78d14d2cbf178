"""Text to token ids and back, with the errors that a client should see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from ...cluster.loop_calls import off_loop
from ...core.errors import RequestError
from ...core.request.sampling_params import SamplingParams
from ...core.request.stop import AnswerText
from ...models.text.chat_template import ChatOptions, ChatTemplate
from ...models.text.token_bytes import TokenBytes
from ...models.text.tokenizer import Detokenizer

T = TypeVar("T")

# Above so many characters, tokens or messages, work takes milliseconds and must not hold up other
# streams.
INLINE_CHARS = 4_000
INLINE_TOKENS = 2_000
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
        return {text: index for index, text in self.bytes_of.special_tokens.items()}

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of `text`; `special` adds the model's own special tokens."""
        return (await self.encode_all([text], special=special))[0]

    async def encode_all(
        self, texts: Sequence[str], *, special: bool = True
    ) -> list[tuple[int, ...]]:
        """Token ids of each text."""
        is_short = sum(map(len, texts)) <= INLINE_CHARS

        def encode() -> list[tuple[int, ...]]:
            return [
                tuple(self.tokenizer.encode(text, add_special_tokens=special)) for text in texts
            ]

        return await _run(encode, is_short)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """The text of a chat. Raises `RequestError` as `ChatTemplate.render` does."""
        if _is_short(messages, options):
            return self.template.render(messages, options)
        return await off_loop(self.template.render, messages, options, timeout_s=TEMPLATE_TIMEOUT_S)

    async def decode(self, token_ids: Sequence[int], field: str = "tokens") -> str:
        """Text of token ids, special tokens included. Raises `RequestError` for unknown ids."""

        def decode() -> str:
            self._spell(token_ids, field)
            return self.tokenizer.decode(list(token_ids))

        return await _run(decode, len(token_ids) <= INLINE_TOKENS)

    def answer_text(self, prompt: Sequence[int], params: SamplingParams) -> AnswerText:
        """Makes the text of an answer whose tokens come without."""
        return AnswerText(params, self.text_stream(prompt, params))

    def text_stream(self, prompt: Sequence[int], params: SamplingParams) -> Detokenizer:
        """Makes text of the tokens that follow a prompt."""
        skips = params.skip_special_tokens
        return Detokenizer(self.bytes_of, prompt, skip_special_tokens=skips)

    async def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token. Raises `RequestError` for unknown ids."""
        return await _run(lambda: self._spell(token_ids, "tokens"), len(token_ids) <= INLINE_TOKENS)

    def _spell(self, token_ids: Sequence[int], field: str) -> list[str]:
        tokens = self.tokenizer.convert_ids_to_tokens(list(token_ids))
        # Ids may have gaps: how many tokens there are does not say which.
        if None in tokens:
            unknown = token_ids[tokens.index(None)]
            raise RequestError(field, f"the vocabulary has no token of id {unknown}")
        return tokens


async def _run(work: Callable[[], T], is_short: bool) -> T:
    return work() if is_short else await off_loop(work)


def _is_short(messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> bool:
    """Whether the template takes well under a millisecond; a client's own one never counts so."""
    if len(messages) > INLINE_MESSAGES or options.template is not None:
        return False
    if options.tools or options.documents or options.variables:
        return False
    if any(not message.keys() <= {"role", "content", "name"} for message in messages):
        return False
    return sum(len(message["content"]) for message in messages) <= INLINE_CHARS
