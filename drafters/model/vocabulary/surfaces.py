"""Vocabularies as the bytes that their tokens write, and the tokens that two of them share.

The shared ones are the intersection of token-level drafting (TLI: Timor et al., arXiv 2502.05202,
Algorithm 4).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ....core.arrays import Int64
from ....core.errors import CheckpointError
from ....models.text.tokenizer import BYTE_TOKEN, TokenBytes, load_tokenizer

NO_ID = -1


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


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyMap:
    """An injective map from a drafter's ids to the target's.

    to_target  int64 [drafter's ids]  -1 where the target has no such token
    to_draft   int64 [target's ids]   -1 where the drafter has none
    """

    to_target: Int64
    to_draft: Int64

    @property
    def draft_ids(self) -> Int64:
        """Shared tokens as the drafter's ids, in the order of `target_ids`."""
        return self.to_draft[self.target_ids]

    @property
    def target_ids(self) -> Int64:
        """Shared tokens as the target's ids, ascending."""
        return np.flatnonzero(self.to_draft != NO_ID)

    @property
    def num_shared(self) -> int:
        """Tokens that both have."""
        return int((self.to_draft != NO_ID).sum())

    @property
    def is_identity(self) -> bool:
        """Whether every token of the target has the same id in the drafter, and none is more."""
        same = len(self.to_target) == len(self.to_draft)
        return same and bool((self.to_draft == np.arange(len(self.to_draft))).all())

    def describe(self) -> str:
        """One line for people: how many tokens are shared, and what share of either side."""
        target, draft = len(self.to_draft), len(self.to_target)
        return (
            f"{self.num_shared} tokens are in both: {self.num_shared / max(target, 1):.0%} of the "
            f"target's {target}, {self.num_shared / max(draft, 1):.0%} of the drafter's {draft}"
        )


def map_vocabularies(
    draft: Vocabulary, target: Vocabulary, draft_size: int, target_size: int
) -> VocabularyMap:
    """Pair the tokens that write the same bytes, and the tokens that end or begin a text.

    Of several tokens of equal bytes the first is paired, pieces before those that only spell bytes.
    Special tokens are paired by what they do, never by their names. Sizes are those of the models.
    """
    to_target = np.full(draft_size, NO_ID, dtype=np.int64)
    to_draft = np.full(target_size, NO_ID, dtype=np.int64)

    def pair(own: int | None, other: int | None) -> None:
        if own is None or other is None or own >= draft_size or other >= target_size:
            return
        if to_target[own] == NO_ID and to_draft[other] == NO_ID:
            to_target[own], to_draft[other] = other, own

    first: dict[bytes, int] = {}
    for token, surface in target.pieces():
        first.setdefault(surface, token)
    for token, surface in draft.pieces():
        pair(token, first.get(surface))
    pair(draft.end, target.end)
    pair(draft.begin, target.begin)
    return VocabularyMap(to_target, to_draft)
