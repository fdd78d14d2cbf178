"""Log-probabilities in the shapes of the two endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs

from ..core.output import TokenLogProb

BytesOf = Callable[[int], bytes]


def completion_logprobs(
    tokens: Sequence[TokenLogProb | None],
    prompt_ids: Sequence[int],
    bytes_of: BytesOf,
    text_offset: int,
) -> Logprobs:
    """Parallel lists; `text_offset` is the place of the first token in the text, characters.

    None stands for the first token of a prompt that is echoed, whose id `prompt_ids` begins with.
    """
    ids = [prompt_ids[0] if token is None else token.token_id for token in tokens]
    texts = [_text(bytes_of(token_id)) for token_id in ids]
    offsets = []
    for text in texts:
        offsets.append(text_offset)
        text_offset += len(text)
    tops: list[Any] = [None if token is None else _top(token, bytes_of) for token in tokens]
    return Logprobs.model_construct(
        tokens=texts,
        token_logprobs=[None if token is None else token.log_prob for token in tokens],
        top_logprobs=tops,
        text_offset=offsets,
    )


def chat_logprobs(
    tokens: Sequence[TokenLogProb], bytes_of: BytesOf
) -> list[ChatCompletionTokenLogprob]:
    """One entry a token."""
    return [
        ChatCompletionTokenLogprob(
            **_spelled(token.token_id, token.log_prob, bytes_of),
            top_logprobs=[
                TopLogprob(**_spelled(token_id, log_prob, bytes_of))
                for token_id, log_prob in token.top
            ],
        )
        for token in tokens
    ]


def prompt_logprobs(
    tokens: Sequence[TokenLogProb | None], bytes_of: BytesOf
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's field of this name: by token id, the prompt's own token first."""
    entries: list[dict[str, dict[str, Any]] | None] = []
    for token in tokens:
        if token is None:
            entries.append(None)
            continue
        pairs = {token.token_id: token.log_prob, **dict(token.top)}
        entries.append(
            {
                str(token_id): {"logprob": log_prob, "decoded_token": _text(bytes_of(token_id))}
                for token_id, log_prob in pairs.items()
            }
        )
    return entries


def _top(token: TokenLogProb, bytes_of: BytesOf) -> dict[str, float]:
    """By text, the chosen token always among them."""
    pairs = [*token.top, (token.token_id, token.log_prob)]
    return {_text(bytes_of(token_id)): log_prob for token_id, log_prob in pairs}


def _spelled(token_id: int, log_prob: float, bytes_of: BytesOf) -> dict[str, Any]:
    data = bytes_of(token_id)
    return {"token": _text(data), "bytes": list(data), "logprob": log_prob}


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
