"""Tokenizers of several kinds, trained in a moment on a few lines."""

from __future__ import annotations

from functools import cache

from draftline.drafters.model.vocabulary.surfaces import Vocabulary, vocabulary_of
from draftline.training.tokenizers import byte_tokenizer, train_tokenizer, train_unigram_tokenizer
from transformers import PreTrainedTokenizerFast

LINES = [
    "def read(self, path):\n    return self.path + path\n",
    "class Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "for name in names:\n    print(name, 'höhe', 12)\n",
    "the cat sat on the mat, and the other cat sat on the hat\n",
]
OTHER_LINES = [
    "def write(self, text):\n    self.text = text + ' '\n",
    "the mat is where the other cats sat; a hat is not a mat\n",
    "return path if path else names\n",
]


@cache
def byte_level_bpe(size: int = 330, *, other: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE; `other`: trained on other lines."""
    return train_tokenizer(OTHER_LINES if other else LINES, size, 256)


@cache
def unigram(size: int = 330) -> PreTrainedTokenizerFast:
    """Pieces with U+2581 for a space, and bytes for what they lack."""
    return train_unigram_tokenizer(OTHER_LINES * 20, size, 256)


@cache
def single_bytes() -> PreTrainedTokenizerFast:
    """A token a byte."""
    return byte_tokenizer(256)


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    """The vocabulary of a model that has all of its tokens."""
    return vocabulary_of(tokenizer, len(tokenizer))


def letters(*tokens: str) -> Vocabulary:
    """A toy vocabulary that spells longest tokens first; its last id ends a text."""
    by_surface = {token: index for index, token in enumerate(tokens)}
    longest = max(map(len, tokens))

    def encode(text: str) -> list[int]:
        ids = []
        while text:
            token = next(text[:n] for n in range(longest, 0, -1) if text[:n] in by_surface)
            ids.append(by_surface[token])
            text = text[len(token) :]
        return ids

    surfaces = [*(token.encode() for token in tokens), None]
    return Vocabulary(surfaces, {}, None, len(tokens), encode)
