"""Text from tokens one by one equals text from all tokens at once."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
from draftline.core.errors import CheckpointError
from draftline.core.request.sampling_params import SamplingParams
from draftline.core.request.stop import StopRule
from draftline.models.text.fingerprint import tokenizer_hash
from draftline.models.text.tokenizer import Detokenizer, TokenBytes, load_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CORPUS = ["def f(x): return x + 1\n", "grüße, 世界! 🙂🙃 naïve café", "the the then them there"]


def byte_level() -> PreTrainedTokenizerBase:
    """As GPT-2, Llama 3, Qwen and the demo models have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentence_pieces() -> PreTrainedTokenizerBase:
    """As Llama 2, Mistral and Gemma have it: word marks, bytes as a fallback, a stripped space."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁the", "▁a", "n", "e", "w", "▁new", "th", ".", "é"]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


TOKENIZERS = {"byte_level": byte_level(), "sentence_pieces": sentence_pieces()}


def decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def text_stream(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int] | None = None, **options: bool
) -> Detokenizer:
    return Detokenizer(TokenBytes(tokenizer), prompt or [], **options)


def characters(data: bytes) -> str:
    """The characters that bytes hold, and one U+FFFD for each byte that belongs to none."""
    text = ""
    while data:
        ends = [end for end in range(1, 5) if is_character(data[:end])]
        text += data[: ends[0]].decode() if ends else "\ufffd"
        data = data[ends[0] if ends else 1 :]
    return text


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def expected(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """What transformers decodes, but that complete characters in runs of byte tokens stay."""
    shown = [token for token in ids if token not in tokenizer.all_special_ids]
    tokens = tokenizer.convert_ids_to_tokens(shown)
    if not any(token.startswith("<0x") for token in tokens):
        return decoded(tokenizer, ids)
    text = ""
    for is_byte, run in groupby(tokens, lambda token: token.startswith("<0x")):
        if is_byte:
            text += characters(bytes(int(token[3:5], 16) for token in run))
        else:
            text += "".join(run).replace("▁", " ")
    return text.removeprefix(" ")


def streamed(stream: Detokenizer, ids: list[int]) -> list[str]:
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_join_to_the_whole_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    assert "".join(streamed(text_stream(tokenizer), ids)) == expected(tokenizer, ids)


@pytest.mark.parametrize("text", CORPUS)
def test_no_piece_holds_half_a_character(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(text)
    pieces = streamed(text_stream(tokenizer), ids)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


def test_a_character_cut_at_the_end_is_shown_as_a_replacement() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    half = tokenizer.encode("ok 🙃")[:-1]
    stream = text_stream(tokenizer)
    early = "".join(stream.push(token) for token in half)
    late = stream.flush()
    assert early.startswith("ok")
    assert "\ufffd" not in early
    assert "\ufffd" in late
    assert early + late == decoded(tokenizer, half)
    assert stream.flush() == ""


def test_words_are_given_out_at_once() -> None:
    for tokenizer in TOKENIZERS.values():
        stream = text_stream(tokenizer)
        for token in tokenizer.convert_tokens_to_ids(["n", "e", "w"]):
            assert stream.push(token) != ""


def test_after_a_prompt_the_leading_space_stays() -> None:
    tokenizer = TOKENIZERS["sentence_pieces"]
    the, new = tokenizer.convert_tokens_to_ids(["▁the", "▁new"])
    assert "".join(streamed(text_stream(tokenizer, [the]), [new, the])) == " new the"
    assert "".join(streamed(text_stream(tokenizer), [new, the])) == "new the"


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    # Byte-level BPE's printable stand-ins for the bytes C3 and A9.
    ids = tokenizer.convert_tokens_to_ids(["Ã", "©"])
    assert streamed(text_stream(tokenizer, ids[:1]), ids[1:]) == ["é", ""]


def byte_ids(text: str) -> list[int]:
    """Byte tokens of a text in the vocabulary of `sentence_pieces`."""
    return TOKENIZERS["sentence_pieces"].convert_tokens_to_ids(
        [f"<0x{byte:02X}>" for byte in text.encode()]
    )


@pytest.mark.parametrize("prompt", ["ကခဂ", "က" * 40, "\ufffd", "ကခဂ\ufffd"])
def test_text_of_the_prompt_is_never_given_out_again(prompt: str) -> None:
    tokenizer = TOKENIZERS["sentence_pieces"]
    [n] = tokenizer.convert_tokens_to_ids(["n"])
    assert streamed(text_stream(tokenizer, byte_ids(prompt)), [n]) == ["n", ""]
    levels = TOKENIZERS["byte_level"]
    ids = levels.encode(prompt)
    assert streamed(text_stream(levels, ids), levels.encode("n")) == ["n", ""]


def test_complete_characters_are_given_out_at_once() -> None:
    tokenizer = TOKENIZERS["sentence_pieces"]
    [n] = tokenizer.convert_tokens_to_ids(["n"])
    ids = [n, *byte_ids("\n\né"), *byte_ids("က")[:2], n, *byte_ids("\n")]
    assert streamed(text_stream(tokenizer), ids) == [
        "n", "\n", "\n", "", "é", "", "", "\ufffd\ufffdn", "\n", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "params", "max_tokens", "expected"),
    [
        ("nn\nnn", {"stop": ("\n",)}, 9, (3, "nn", "stop", "\n")),
        ("n\n", {"stop": ("\n",)}, 2, (2, "n", "stop", "\n")),
        ("n\n$", {"stop": ("\n",)}, 9, (2, "n", "stop", "\n")),
        ("n" + "\n" * 23, {"stop": ("\n\n",)}, 24, (3, "n", "stop", "\n\n")),
        ("n\n$", {}, 9, (3, "n\n", "stop", None)),
        ("\nn", {}, 1, (1, "\n", "length", None)),
    ],
)
def test_a_stop_text_of_byte_tokens_ends_the_answer_where_it_is_complete(
    text: str, params: dict[str, tuple[str, ...]], max_tokens: int, expected: tuple[object, ...]
) -> None:
    tokenizer = TOKENIZERS["sentence_pieces"]
    [n, end] = tokenizer.convert_tokens_to_ids(["n", "</s>"])
    [newline] = byte_ids("\n")
    ids = [{"n": n, "\n": newline, "$": end}[letter] for letter in text]
    stop = StopRule(SamplingParams(**params), (end,), max_tokens, text_stream(tokenizer, [n]))
    assert stop.advance(ids) == expected


def other_decoders() -> dict[str, PreTrainedTokenizerBase]:
    """Decoders that grammar libraries do not read: no strip, no bytes, word marks alone."""
    tokens = ["<unk>", "</s>", "▁the", "▁", "n", "é", "<0x0A>"]
    made = {}
    for name, decoder in {
        "fused": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
        "word_marks": decoders.Metaspace(),
    }.items():
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
        tokenizer.decoder = decoder
        made[name] = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    return made


OTHERS = other_decoders()


@pytest.mark.parametrize("name", OTHERS)
@given(ids=st.lists(st.integers(0, 6), max_size=12))
def test_any_decoder_gives_its_own_text_token_by_token(name: str, ids: list[int]) -> None:
    tokenizer = OTHERS[name]
    assert "".join(streamed(text_stream(tokenizer), ids)) == decoded(tokenizer, ids)


def test_the_bytes_of_tokens() -> None:
    levels = TokenBytes(TOKENIZERS["byte_level"])
    pieces = TokenBytes(TOKENIZERS["sentence_pieces"])

    def written(bytes_of: TokenBytes, *tokens: str) -> list[bytes]:
        return [bytes_of.of_token(token) for token in tokens]

    assert written(levels, "Ġthe", "Ã", "<|end|>", "<0x0A>") == [
        b" the", b"\xc3", b"<|end|>", b"<0x0A>",
    ]  # fmt: skip
    assert written(pieces, "▁the", "<0xC3>", "é", "</s>") == [
        b" the",
        b"\xc3",
        "é".encode(),
        b"</s>",
    ]
    # An id that the vocabulary has no token for, as heads that are larger than it have.
    assert pieces(10_000) == b""


def test_special_tokens_have_no_text_unless_wanted() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [*tokenizer.encode("the"), 0, *tokenizer.encode("n")]
    assert "".join(streamed(text_stream(tokenizer), ids)) == "then"
    shown = streamed(text_stream(tokenizer, skip_special_tokens=False), ids)
    assert "".join(shown) == "the<|end|>n"


def test_the_hash_follows_the_meaning_of_token_ids(tmp_path: Path) -> None:
    for name, tokenizer in TOKENIZERS.items():
        tokenizer.save_pretrained(tmp_path / name)
    byte_level().save_pretrained(tmp_path / "again")
    hashes = [tokenizer_hash(tmp_path / n) for n in ("byte_level", "again", "sentence_pieces")]
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]
    assert len(hashes[0]) == 32


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)
