"""What tokens write, by kind of tokenizer, and what two vocabularies share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from draftline.core.errors import CheckpointError
from draftline.drafters.model.vocabulary.surfaces import (
    NO_ID,
    Speller,
    map_vocabularies,
    vocabulary_of,
)
from support.tools.tiny_tokenizers import (
    byte_level_bpe,
    letters,
    single_bytes,
    unigram,
    vocabulary,
)
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.generation.candidate_generator import AssistantToTargetTranslator

TEXTS = [
    "def read(x):\n    return 1\n",
    "höhe \U0001f600 \u2010",
    " the  cat\t",
    "</s> <|endoftext|>",
]
KINDS = {"bpe": byte_level_bpe, "unigram": unigram, "bytes": single_bytes}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_write_their_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    own = vocabulary(tokenizer)
    ids = own.encode(text)
    written = own.bytes_of(ids)
    # SentencePiece puts a space before the first word.
    assert written in (text.encode(), b" " + text.encode())
    assert Speller(own).spell(text.encode())
    assert own.bytes_of(Speller(own).spell(text.encode())) == text.encode()
    assert not own.bytes_of(tokenizer.all_special_ids)


def test_shared_tokens_write_the_same_and_are_paired_once() -> None:
    draft, target = vocabulary(unigram()), vocabulary(byte_level_bpe())
    shared = map_vocabularies(draft, target, len(draft.surfaces), len(target.surfaces))
    assert len(set(shared.draft_ids.tolist())) == shared.num_shared > 100
    for own, other in zip(shared.draft_ids.tolist(), shared.target_ids.tolist(), strict=True):
        assert shared.to_target[own] == other
        is_end = own == draft.end
        assert is_end or draft.surfaces[own] == target.surfaces[other] is not None
    assert shared.to_target[draft.end] == target.end
    # The target begins a text with the token that ends it, which is taken.
    assert shared.to_target[draft.begin] == NO_ID
    assert f"{shared.num_shared} tokens are in both" in shared.describe()


def test_a_piece_is_paired_before_the_byte_that_spells_it() -> None:
    draft = vocabulary(unigram())
    both = [token for token, surface in enumerate(draft.surfaces) if surface == b"a"]
    assert len(both) == 2
    [piece] = set(both) - set(draft.byte_ids.values())
    target = letters("b", "a")
    shared = map_vocabularies(draft, target, len(draft.surfaces), 3)
    assert shared.to_draft[1] == piece


def test_the_sizes_of_the_models_bound_the_map() -> None:
    own = vocabulary(byte_level_bpe())
    shared = map_vocabularies(own, own, 300, 400)
    assert len(shared.to_target) == 300
    assert (shared.to_draft[300:] == NO_ID).all()
    assert shared.to_draft[:300].tolist() == list(range(300))
    assert not shared.is_identity
    assert map_vocabularies(own, own, 330, 330).is_identity
    cut = vocabulary_of(byte_level_bpe(), 300)
    assert all(len(cut.surface(token)) == 0 for token in range(300, 330))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_what_transformers_pairs_is_paired_alike(kind: str) -> None:
    drafter = byte_level_bpe(310, other=True) if kind == "bpe" else unigram()
    target = byte_level_bpe()
    draft, other = vocabulary(drafter), vocabulary(target)
    shared = map_vocabularies(draft, other, len(draft.surfaces), len(other.surfaces))
    theirs = AssistantToTargetTranslator(target, drafter, len(other.surfaces))
    pairs = {
        own: target_id
        for own, target_id in enumerate(theirs._assistant_to_target_input_ids.tolist())
        if target_id >= 0 and draft.surfaces[own] is not None
    }
    assert pairs
    # It reads an accented letter of one kind as the byte that it stands for in the other.
    ascii_pairs = {own: other_id for own, other_id in pairs.items() if draft.surface(own).isascii()}
    assert len(ascii_pairs) > 20
    for own, target_id in ascii_pairs.items():
        if draft.surface(own) == other.surface(target_id):
            assert shared.to_target[own] in (target_id, NO_ID)
    if kind == "bpe":
        assert {own: int(shared.to_target[own]) for own in pairs} == pairs
        own_ends = [draft.end]
        assert shared.num_shared == len(pairs) + len(own_ends)


def test_a_tokenizer_that_does_not_say_where_spaces_are_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(CheckpointError, match="WordPiece"):
        vocabulary_of(tokenizer, 3, str(tmp_path))


def test_the_coverage_of_nothing_is_nothing() -> None:
    shared = map_vocabularies(letters("x"), letters("y"), 1, 1)
    assert (shared.to_draft == np.array([NO_ID])).all()
    assert shared.num_shared == 0
