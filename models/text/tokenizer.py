"""Tokenizers: loading, and text from tokens one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ...core.arrays import Int32
from ...core.errors import CheckpointError
from ..load.checkpoint import resolve_model_path
from .token_bytes import TokenBytes

# Bytes of UTF-8 that a character may have without being complete.
MOST_UNFINISHED = 3


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id. Raises `CheckpointError`."""
    folder = resolve_model_path(model)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} has no usable tokenizer ({error}); it needs tokenizer.json and "
            "tokenizer_config.json"
        ) from error


class Detokenizer:
    """Turns tokens into text one by one; a character is given out by the token that completes it.

    The texts of `push` and `flush`, joined, equal the text of all tokens decoded at once (after the
    prompt's text, if the prompt is given). There is one exception: complete characters stay if
    later bytes form none, while decoders with byte tokens replace the whole run. Skipped special
    tokens have no text.
    """

    __slots__ = ("_bytes_of", "_decoder", "_is_start", "_skipped")

    def __init__(
        self, bytes_of: TokenBytes, prompt_ids: Sequence[int] | Int32 = (),
        *, skip_special_tokens: bool = True,
    ) -> None:  # fmt: skip
        self._bytes_of = bytes_of
        self._decoder = bytes_of.decoder()
        self._skipped = bytes_of.special_tokens if skip_special_tokens else {}
        tail = b""
        for token_id in map(int, reversed(prompt_ids)):
            if token_id not in self._skipped:
                tail = bytes_of(token_id) + tail
            if len(tail) >= MOST_UNFINISHED:
                break
        self._is_start = not tail
        self._decoder.decode(tail)

    def push(self, token_id: int) -> str:
        """Text that this token makes final; empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        if self._is_start:
            self._is_start = False
            return self._decoder.decode(self._bytes_of.at_start(token_id))
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """What is left at the end, with replacement characters for incomplete ones."""
        return self._decoder.decode(b"", final=True)


def bad_word_ids(words: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Token ids of each word at the start of a text and after a space, as vLLM spells them.

    The spelling after a space counts only where the space becomes a part of its first token and
    the number of tokens stays; otherwise the plain one is found in the text as well.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        plain = _encode(word.lstrip(), tokenizer)
        spaced = _encode(" " + word.lstrip(), tokenizer)
        if plain:
            sequences.append(plain)
        if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    return sequences


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
