"""The bytes of tokens, the basis of text, log-probabilities and vocabularies.

Tokenizers spell the same text in other ways: byte-level BPE writes every byte as a character of
its own (a space as U+0120), SentencePiece writes a space as U+2581 and bytes without a piece as
`<0x0A>`. Bytes are what they have in common, and only bytes add up: a character may be spread over
several tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
