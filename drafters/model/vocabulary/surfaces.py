"""Vocabularies as the bytes that their tokens write: what unlike tokenizers have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ....core.errors import CheckpointError
from ....models.text.tokenizer import BYTE_TOKEN, TokenBytes, load_tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens of one tokenizer.

    surfaces    bytes of each id; None: a special token, or no token at all
    byte_ids    tokens that only spell single bytes which no piece writes, by byte
    begin, end  ids of the tokens that begin and end a text
    encode      a text's ids, no special token among them
    """

    surfaces: Sequence[bytes | None]
    byte_ids: Mapping[int, int]
    begin: int | None
    end: int | None
    encode: Callable[[str], list[int]]

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The bytes that tokens write; special tokens write none."""
        return b"".join(self.surface(token) for token in ids)

    def surface(self, token: int) -> bytes:
        """The bytes of one token; none where it is special or unknown."""
        return (self.surfaces[token] or b"") if 0 <= token < len(self.surfaces) else b""

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Ids and bytes of the tokens that write any: those that only spell bytes come last."""
        spelling = frozenset(self.byte_ids.values())
        for is_spelling in (False, True):
            for token, surface in enumerate(self.surfaces):
                if surface and (token in spelling) == is_spelling:
                    yield token, surface


def read_vocabulary(folder: str | Path, size: int) -> Vocabulary:
    """The vocabulary of a model folder or hub id, of whose ids the model has the first `size`.

    Raises `CheckpointError`.
    """
    return vocabulary_of(load_tokenizer(folder), size, str(folder))


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, size: int, name: str = "it") -> Vocabulary:
    """The vocabulary of a tokenizer, of whose ids a model has the first `size`.

    `name` is for messages.

    Raises `CheckpointError` for a tokenizer that does not say which bytes its tokens write.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise CheckpointError(f"{name} has no tokenizer.json; save it by a fast tokenizer")
    settings = json.loads(backend.to_str())
    kinds = {kind["type"]: kind for kind in _components(settings["decoder"])}
    if "WordPiece" in kinds:
        raise CheckpointError(f"{name}: WordPiece tokens do not say where spaces are")
    spells = bool(settings["model"].get("byte_fallback"))
    bytes_of = TokenBytes(tokenizer)
    surfaces: list[bytes | None] = [None] * size
    byte_ids: dict[int, int] = {}
    for token, index in backend.get_vocab(with_added_tokens=False).items():
        byte = BYTE_TOKEN.fullmatch(token) if spells else None
        if index >= size:
            continue
        if byte is not None:
            byte_ids[int(byte[1], 16)] = index
            surfaces[index] = bytes.fromhex(byte[1])
        else:
            surfaces[index] = bytes_of.of_token(token)
    for index, added in tokenizer.added_tokens_decoder.items():
        if index < size:
            is_special = added.special or index in tokenizer.all_special_ids
            surfaces[index] = None if is_special else added.content.encode()
    ends: list[Any] = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    begin, end = (index if index is not None and index < size else None for index in ends)
    return Vocabulary(surfaces, byte_ids, begin, end, _encoder(backend))


def _components(decoder: Any) -> Iterator[dict[str, Any]]:
    if decoder is not None:
        yield decoder
        for part in decoder.get("decoders", ()):
            yield from _components(part)


def _encoder(backend: Tokenizer) -> Callable[[str], list[int]]:
    """Ids of a text, in which the names of special tokens are text like any other."""
    own = Tokenizer.from_str(backend.to_str())
    own.encode_special_tokens = True
    own.no_truncation()
    own.no_padding()
    return lambda text: own.encode(text, add_special_tokens=False).ids


class Speller:
    """Greedy longest match over the bytes of a vocabulary's tokens."""

    __slots__ = ("_longest", "_tokens")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens: dict[bytes, int] = {}
        for token, surface in vocabulary.pieces():
            self._tokens.setdefault(surface, token)
        self._longest = max(map(len, self._tokens), default=0)

    def spell(self, text: bytes) -> tuple[int, ...]:
        """Tokens that write `text`; bytes that no token writes are left out."""
        ids: list[int] = []
        start = 0
        while start < len(text):
            end = next(
                (
                    end
                    for end in range(min(len(text), start + self._longest), start, -1)
                    if text[start:end] in self._tokens
                ),
                None,
            )
            if end is None:
                start += 1
            else:
                ids.append(self._tokens[text[start:end]])
                start = end
        return tuple(ids)
