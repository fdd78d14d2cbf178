"""Log-probabilities in the shapes of the two endpoints, made where a body is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from openai.types.completion_choice import Logprobs

from ....core.request.output import TokenLogProb
from .event_stream import LazyList

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
    return Logprobs.model_construct(
        tokens=texts,
        token_logprobs=[None if token is None else token.log_prob for token in tokens],
        top_logprobs=LazyList(partial(_top, bytes_of), tokens),
        text_offset=offsets,
    )


def chat_logprobs(tokens: Sequence[TokenLogProb], bytes_of: BytesOf) -> LazyList:
    """One entry a token."""
    return LazyList(partial(chat_logprob, bytes_of), tokens)


def chat_logprob(bytes_of: BytesOf, token: TokenLogProb) -> dict[str, Any]:
    """The entry of one token."""
    top = [_spelled(token_id, log_prob, bytes_of) for token_id, log_prob in token.top]
    return _spelled(token.token_id, token.log_prob, bytes_of) | {"top_logprobs": top}


def prompt_logprobs(tokens: Sequence[TokenLogProb | None], bytes_of: BytesOf) -> LazyList:
    """vLLM's field of this name: by token id, the prompt's own token first."""

    def entry(token: TokenLogProb | None) -> dict[str, dict[str, Any]] | None:
        if token is None:
            return None
        pairs = {token.token_id: token.log_prob, **dict(token.top)}
        return {
            str(token_id): {"logprob": log_prob, "decoded_token": _text(bytes_of(token_id))}
            for token_id, log_prob in pairs.items()
        }

    return LazyList(entry, tokens)


def _top(bytes_of: BytesOf, token: TokenLogProb | None) -> dict[str, float] | None:
    """By text, the chosen token always among them."""
    if token is None:
        return None
    pairs = [*token.top, (token.token_id, token.log_prob)]
    return {_text(bytes_of(token_id)): log_prob for token_id, log_prob in pairs}


def _spelled(token_id: int, log_prob: float, bytes_of: BytesOf) -> dict[str, Any]:
    data = bytes_of(token_id)
    return {"token": _text(data), "bytes": list(data), "logprob": log_prob}


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
