"""Text from tokens one by one equals text from all tokens at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftline.core.errors import CheckpointError
from draftline.models.text.fingerprint import tokenizer_hash
from draftline.models.text.tokenizer import TextStream, load_tokenizer
from hypothesis import given, settings
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


def streamed(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    assert "".join(streamed(TextStream(tokenizer), ids)) == decoded(tokenizer, ids)


@pytest.mark.parametrize("text", CORPUS)
def test_no_piece_holds_half_a_character(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(text)
    pieces = streamed(TextStream(tokenizer), ids)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


def test_a_character_cut_at_the_end_is_shown_as_a_replacement() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    half = tokenizer.encode("ok 🙃")[:-1]
    stream = TextStream(tokenizer)
    early = "".join(stream.push(token) for token in half)
    late = stream.flush()
    assert early.startswith("ok")
    assert "\ufffd" not in early
    assert "\ufffd" in late
    assert early + late == decoded(tokenizer, half)
    assert stream.flush() == ""


def test_words_are_given_out_at_once() -> None:
    for tokenizer in TOKENIZERS.values():
        stream = TextStream(tokenizer)
        for token in tokenizer.convert_tokens_to_ids(["n", "e", "w"]):
            assert stream.push(token) != ""


def test_after_a_prompt_the_leading_space_stays() -> None:
    tokenizer = TOKENIZERS["sentence_pieces"]
    the, new = tokenizer.convert_tokens_to_ids(["▁the", "▁new"])
    assert "".join(streamed(TextStream(tokenizer, [the]), [new, the])) == " new the"
    assert "".join(streamed(TextStream(tokenizer), [new, the])) == "new the"


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    # Byte-level BPE's printable stand-ins for the bytes C3 and A9.
    ids = tokenizer.convert_tokens_to_ids(["Ã", "©"])
    assert streamed(TextStream(tokenizer, ids[:1]), ids[1:]) == ["é", ""]


def test_special_tokens_have_no_text_unless_wanted() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [*tokenizer.encode("the"), 0, *tokenizer.encode("n")]
    assert "".join(streamed(TextStream(tokenizer), ids)) == "then"
    shown = streamed(TextStream(tokenizer, skip_special_tokens=False), ids)
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
