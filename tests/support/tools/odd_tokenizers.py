"""Tokenizers that differ from what libraries expect: in decoders, in gaps of ids, in size."""

from __future__ import annotations

import string
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"
# One token for each character that the tests write, and some for several.
PIECES = [
    *string.printable[:95].replace(" ", SPACE),
    *"\n\t\x7fé世",
    *("ab", "abc", SPACE + "a", '{"', '":', "ca", "cat", SPACE + "cat", "}]"),
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
END = "</s>"


def _bpe(pieces: list[str], *, first_id: int = 0, by_bytes: bool = False) -> Tokenizer:
    """BPE whose merges make each longer piece of its first part and its last character."""
    ids = {piece: first_id + index for index, piece in enumerate(pieces)}
    merges = [(piece[:-1], piece[-1]) for piece in pieces if len(piece) > 1 and piece[:-1] in ids]
    return Tokenizer(models.BPE(ids, merges, byte_fallback=by_bytes, fuse_unk=False))


def _finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    made.add_special_tokens({"eos_token": END})
    return made


def replace_and_fuse() -> PreTrainedTokenizerFast:
    """A decoder of `Replace` and `Fuse`, with no bytes to fall back on."""
    tokenizer = _bpe(PIECES)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse()])
    return _finished(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """A decoder that is `Metaspace` alone, which drops the space at the start of a text."""
    tokenizer = _bpe(PIECES)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE)
    tokenizer.decoder = decoders.Metaspace(SPACE)
    return _finished(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: a space is put before a text, and dropped again."""
    tokenizer = _bpe([*BYTES, *PIECES], by_bytes=True)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return _finished(tokenizer)


def with_gaps() -> PreTrainedTokenizerFast:
    """Ids from 200 on: more than there are tokens."""
    tokenizer = _bpe(PIECES, first_id=200)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _finished(tokenizer)


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE with special tokens behind its end, as models of images have them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    more = ["ab", "abc", "\u0120a", '{"', '":', "ca", "cat", "}]"]
    tokenizer = _bpe([*alphabet, *more])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = _finished(tokenizer)
    made.add_tokens([AddedToken("<image>", special=True), AddedToken("catcat", special=False)])
    return made


# Each tokenizer, and how many rows the head of its model has.
ODD: dict[str, tuple[Callable[[], PreTrainedTokenizerFast], int]] = {
    "replace and fuse": (replace_and_fuse, 128),
    "metaspace": (metaspace, 110),
    "byte fallback": (byte_fallback, 384),
    "gaps": (with_gaps, 320),
    "larger than the head": (byte_level, 265),
}
