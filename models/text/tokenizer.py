"""Tokenizers: loading, and text from tokens one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ...core.errors import CheckpointError
from ..load.checkpoint import resolve_model_path

REPLACEMENT = "\ufffd"
# Tokens of the prompt that the first window looks back on: more than a character has bytes.
LOOKBACK = 8


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


class TextStream:
    """Turns tokens into text one by one; only text that no later token can change is given out.

    All texts of `push` and `flush` together are what decoding all tokens at once gives (after
    the prompt's text, if the prompt's last tokens are given). Special tokens have no text.
    """

    __slots__ = ("_border", "_decoder", "_given", "_silent", "_skip", "_tokenizer", "_window")

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int] = (),
        *, skip_special_tokens: bool = True,
    ) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        self._decoder = _decoder(tokenizer)
        self._skip = skip_special_tokens
        self._silent = frozenset(tokenizer.all_special_ids if skip_special_tokens else ())
        # The window is the tokens that last gave text, whose text is `_given`, and from `_border`
        # on those that have given none yet. Decoding them together matters to decoders that treat
        # the start of a text specially; both ends of `_given` lie between characters.
        self._window = list(prompt_ids[-LOOKBACK:])
        self._border = len(self._window)
        self._given = self._decode().rstrip(REPLACEMENT)

    def push(self, token_id: int) -> str:
        """Text that this token makes final; empty while a character is incomplete."""
        self._window.append(token_id)
        # What has no text cannot end a run of bytes either.
        if token_id in self._silent or self._is_byte(token_id):
            return ""
        text = self._decode()
        if text.endswith(REPLACEMENT) or len(text) <= len(self._given):
            return ""
        new = text[len(self._given) :]
        del self._window[: self._border]
        self._border = len(self._window)
        self._given = self._decode()
        return new

    def flush(self) -> str:
        """What is left at the end, with replacement characters for incomplete ones."""
        new = self._decode()[len(self._given) :]
        self._given += new
        self._border = len(self._window)
        return new

    def _is_byte(self, token_id: int) -> bool:
        """Whether it is one byte of a fallback: one bad byte later spoils the text of its run."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and len(token) == 6 and token.startswith("<0x")

    def _decode(self) -> str:
        return self._decoder(self._window, skip_special_tokens=self._skip) if self._window else ""


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[..., str]:
    """Text of tokens. The library under a fast tokenizer does without a wrapper's checks."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer.backend_tokenizer.decode
    decode: Any = tokenizer.decode
    return partial(decode, clean_up_tokenization_spaces=False)


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
