"""Tokenizers: loading, the bytes of tokens, and text from tokens one by one.

Tokenizers spell the same text in other ways: byte-level BPE writes every byte as a character of
its own (a space as U+0120), SentencePiece writes a space as U+2581 and bytes without a piece as
`<0x0A>`. Bytes are what they have in common, and only bytes add up: a character may be spread over
several tokens. Only loading imports transformers: the grammar process starts quickly.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.arrays import Int32
from ...core.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Bytes of UTF-8 that a character may have without being complete.
MOST_UNFINISHED = 3


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id. Raises `CheckpointError`."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - see above

    from ..load.checkpoint import resolve_model_path  # noqa: PLC0415

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


# A token that writes one byte which no piece of the vocabulary writes.
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# A token's text may differ at the start of a text; after this token it does not.
BEFORE = "a"


def _byte_characters() -> dict[str, int]:
    """The byte that each character of byte-level BPE stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    own = {chr(byte): byte for byte in printable}
    return own | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_characters()


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD a byte, as decoders with byte tokens write bytes that form no character."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("draftline.replace_each", _replace_each)
_ReplaceDecoder = codecs.getincrementaldecoder("utf-8")


class TokenBytes:
    """Looks up what each token of one tokenizer writes, as its own decoder has it.

    The bytes of consecutive tokens, joined, are the UTF-8 of their text. Special tokens write their
    spelling; ids without a token write nothing. Look-ups are kept: one object serves all requests.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Decoded together with a following token, since some decoders put a space between tokens.
        self._tail = len(self._write([BEFORE, BEFORE])) - len(BEFORE)
        self._is_byte_level = self._behind("\u0120") == " "
        self._has_byte_tokens = self._behind("<0x41>") == "A"
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """What the token writes anywhere but at the start of a text."""
        data = self._known.get(token_id)
        if data is None:
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            data = self.of_token(token) if isinstance(token, str) else b""
            self._known[token_id] = data
        return data

    def at_start(self, token_id: int) -> bytes:
        """What the token writes at the start of a text, where some decoders drop a space."""
        data = self(token_id)
        if data.startswith(b" "):
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            if not self._write([str(token)]).startswith(" "):
                return data[1:]
        return data

    def of_token(self, token: str) -> bytes:
        """The bytes of a token by the vocabulary's own spelling."""
        if self._is_byte_level:
            known = [BYTE_OF.get(character, -1) for character in token]
            return token.encode() if -1 in known else bytes(known)
        if self._has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        return self._behind(token).encode()

    @cached_property
    def special_tokens(self) -> Mapping[int, str]:
        """The spelling of special tokens, which have no text unless it is asked for, by id."""
        tokenizer = self._tokenizer
        texts = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        added = tokenizer.added_tokens_decoder
        return texts | {index: token.content for index, token in added.items() if token.special}

    def decoder(self) -> codecs.IncrementalDecoder:
        """Makes text of bytes; those that form no character become U+FFFD, as in transformers."""
        return _ReplaceDecoder("draftline.replace_each" if self._has_byte_tokens else "replace")

    def _behind(self, token: str) -> str:
        text = self._write([BEFORE, token, BEFORE])
        return text[len(BEFORE) : len(text) - self._tail]

    def _write(self, tokens: list[str]) -> str:
        return self._tokenizer.convert_tokens_to_string(tokens)
