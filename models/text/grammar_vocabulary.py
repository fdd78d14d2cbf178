"""A model's vocabulary for llguidance: the bytes of each id, and the tokenization of texts.

llguidance's own reader of a `tokenizer.json` supports few decoders. It fails if ids have gaps, or
if the tokenizer is larger than the model's head. The bytes here are those of the output text
(`token_bytes.py`), so a grammar applies to exactly the text that a client reads. Imports no
transformers: the process that runs it starts quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from llguidance import LLTokenizer
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from .token_bytes import TokenBytes

# llguidance's mark of special tokens: a byte that no text has.
SPECIAL_MARK = b"\xff"


def grammar_tokenizer(tokenizer: str, size: int, end_ids: Sequence[int]) -> LLTokenizer:
    """The tokens below `size` of a `tokenizer.json`; `end_ids` end every text."""
    vocabulary = GrammarVocabulary(tokenizer, size, end_ids[0])
    made = LLTokenizer(cast("Any", vocabulary), eos_token=list(end_ids))
    vocabulary.greedy = made
    return made


class GrammarVocabulary:
    """The interface that `LLTokenizer` needs of a Python tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokenizer: str, size: int, end_id: int) -> None:
        self._backend = _for_pieces(Tokenizer.from_str(tokenizer))
        self.eos_token_id = end_id
        self.tokens = _tokens(self._backend, size)
        # Spells what the tokenizer itself does not spell as it stands, token by longest token.
        self.greedy: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """Ids of a piece of an answer, as the model would tokenize it."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        # Ids beyond the head write nothing.
        with suppress(IndexError):
            if b"".join(map(self.tokens.__getitem__, ids)) == text.encode():
                return ids
        return [] if self.greedy is None else self.greedy.greedy_tokenize(text)


class _Spelling:
    """The calls of a transformers tokenizer that `TokenBytes` needs."""

    def __init__(self, backend: Tokenizer) -> None:
        self.convert_ids_to_tokens = backend.id_to_token
        self._decoder = backend.decoder

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)


def _tokens(backend: Tokenizer, size: int) -> list[bytes]:
    """The bytes of every id; of special tokens their spelling after a mark; b"" for no token."""
    bytes_of = TokenBytes(cast("Any", _Spelling(backend)))
    tokens = [bytes_of(index) for index in range(size)]
    for index, added in backend.get_added_tokens_decoder().items():
        text = added.content
        # Grammars of clients name such tokens as `<name>`, special or not.
        if index < size and (added.special or (text.startswith("<") and text.endswith(">"))):
            tokens[index] = SPECIAL_MARK + text.encode()
    return tokens


def _for_pieces(backend: Tokenizer) -> Tokenizer:
    """The tokenizer for pieces of a text: they begin with no space, and special tokens are text."""
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    before = _parts(backend.normalizer, normalizers.Sequence)
    kept = [part for part in before if not isinstance(part, normalizers.Prepend)]
    if len(kept) < len(before):
        backend.normalizer = normalizers.Sequence(kept)
    for part in _parts(backend.pre_tokenizer, pre_tokenizers.Sequence):
        if isinstance(part, pre_tokenizers.Metaspace):
            part.prepend_scheme = "never"
        elif isinstance(part, pre_tokenizers.ByteLevel):
            part.add_prefix_space = False
    return backend


def _parts(whole: Any, sequence: type) -> list[Any]:
    """A normalizer or pre-tokenizer, or those that it is a sequence of."""
    if not isinstance(whole, sequence):
        return [] if whole is None else [whole]
    return [part for each in cast("Any", whole) for part in _parts(each, sequence)]
