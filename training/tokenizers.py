"""Tokenizers of the demo models: byte-level BPE, and others for drafters with other tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

# The demo models are trained on Python, not on chats: a chat becomes a comment block followed by
# code.
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}\n{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, context_len: int
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `texts` with exactly `vocab_size` entries; id 0 is the end of text.

    Any byte string survives encode and decode unchanged, because all 256 bytes are entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=context_len,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
# Digits and underscores stay with letters, as in identifiers.
WORDS = r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+"
# Below every piece's score, so that bytes only spell text without a piece.
BYTE_SCORE = -30.0


def train_unigram_tokenizer(
    texts: Iterable[str], vocab_size: int, context_len: int
) -> PreTrainedTokenizerFast:
    """Unigram pieces over `texts` with exactly `vocab_size` entries, spaces written as U+2581.

    As SentencePiece has them: a space is put before the first word, and characters without a piece
    are spelled in bytes, each of which has a token (Kudo and Richardson 2018, arXiv 1808.06226).
    """
    specials = [UNKNOWN, BEGIN, END]
    trained = _with_spaces(Tokenizer(models.Unigram()))
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - len(BYTE_TOKENS),
        special_tokens=specials,
        unk_token=UNKNOWN,
        show_progress=False,
    )
    # Non-ASCII characters are spelled in bytes and need no pieces.
    plain = (text.encode("ascii", "ignore").decode() for text in texts)
    trained.train_from_iterator(plain, trainer)
    pieces = json.loads(trained.to_str())["model"]["vocab"]
    assert [piece for piece, _ in pieces[:3]] == specials
    scored = [*pieces[:3], *((token, BYTE_SCORE) for token in BYTE_TOKENS), *pieces[3:]]
    scored = [(piece, float(score)) for piece, score in scored]
    tokenizer = _with_spaces(
        Tokenizer(models.Unigram(scored[:vocab_size], unk_id=0, byte_fallback=True))
    )
    tokenizer.add_special_tokens(specials)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrapped(tokenizer, context_len, UNKNOWN)


def byte_tokenizer(context_len: int) -> PreTrainedTokenizerFast:
    """A token for each byte, after the two that begin and end a text: 258 entries."""
    specials = [BEGIN, END]
    # In the order of the bytes that they stand for.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte)
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return _wrapped(tokenizer, context_len)


def _with_spaces(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        ]
    )
    return tokenizer


def _byte(character: str) -> int:
    """The byte that a byte-level tokenizer writes as this character."""
    code = ord(character)
    if code < 0x100:
        return code
    # Bytes without a printable character of their own follow from U+0100 on, in their order.
    missing = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return missing[code - 0x100]


def _wrapped(
    tokenizer: Tokenizer, context_len: int, unknown: str | None = None
) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        unk_token=unknown,
        model_max_length=context_len,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
