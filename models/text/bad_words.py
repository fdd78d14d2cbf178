"""The token sequences that spell a bad word."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase


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
