"""Which of the target's tokens a drafted token is heard as, and that their noise ranks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftline.core.proposals import DraftRequest, Query
from draftline.core.sampling import gumbel
from draftline.drafters.coupled_rank import CoupledChoice
from draftline.drafters.model.drafter import ModelDrafter
from draftline.drafters.model.options import ModelOptions
from draftline.drafters.model.vocabulary import target_noise
from draftline.drafters.model.vocabulary.target_noise import (
    NO_TOKEN,
    Retokenized,
    TargetNoise,
    TargetTokens,
)
from draftline.drafters.model.vocabulary.written import WrittenVocabulary
from draftline.models.load.model_info import ModelInfo
from support.fakes.fake_model_stage import FakeModelStage
from support.tools.tiny_tokenizers import letters, single_bytes, unigram, vocabulary

DRAFT = letters("a", "b", "c", "ab", "cab")
TARGET = letters("a", "b", "c", "bc", "abc", "ca")
A, B, C, AB, CAB, END = range(6)
T_A, T_B, T_C, T_BC, T_ABC, T_CA, T_END = range(7)
TOKENS = TargetTokens(DRAFT, TARGET)
TEMPERATURE, SEED, NEXT = 0.8, 11, 40
CHOICE = CoupledChoice(TEMPERATURE, SEED, NEXT)


def noise_of(token: int, position: int) -> float:
    seed, at, ids = (np.array([one], dtype=np.int64) for one in (SEED, position, token))
    return float(gumbel(seed, at, ids)[0])


def test_a_token_of_its_own_is_the_next_one() -> None:
    assert TOKENS.after(T_B, A) == Retokenized(T_A, 0, T_A, 1)
    assert TOKENS.after(T_A, CAB) == Retokenized(T_CA, 0, T_B, 2)


def test_what_is_written_with_the_last_token_takes_its_place() -> None:
    assert TOKENS.after(T_C, A) == Retokenized(T_CA, -1, T_CA, 0)
    assert TOKENS.after(T_C, AB) == Retokenized(T_CA, -1, T_B, 1)


def test_the_end_of_a_text_is_the_target_s() -> None:
    assert TOKENS.after(T_A, END) == Retokenized(T_END, 0, T_END, 1)
    # Nothing before it counts behind a special token.
    assert TOKENS.after(T_END, C) == Retokenized(T_C, 0, T_C, 1)


def test_half_a_character_adds_no_token() -> None:
    draft, target = vocabulary(single_bytes()), vocabulary(unigram())
    half = draft.encode("é")[0]
    [letter] = target.encode("x")[-1:]
    assert TargetTokens(draft, target).after(letter, half) == Retokenized(NO_TOKEN, 0, letter, 0)


def test_no_more_is_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {(last, token): TOKENS.after(last, token) for last in range(6) for token in range(5)}
    monkeypatch.setattr(target_noise, "MAX_REMEMBERED", 4)
    tokens = TargetTokens(DRAFT, TARGET)
    for pair, heard in expected.items():
        assert tokens.after(*pair) == heard
        assert len(tokens._remembered) <= 4


def test_ranks_are_those_of_the_target_s_noise() -> None:
    ids = np.array([A, B, C], dtype=np.int32)
    log_probs = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    # Behind the drafted "b" a "c" makes it "bc", which takes its place.
    noise = TargetNoise(TOKENS, T_A, CHOICE)
    ranked, given = noise.rank([B], ids, log_probs, 3)
    places = {A: (T_A, NEXT + 1), B: (T_B, NEXT + 1), C: (T_BC, NEXT)}
    scores = {
        token: float(log_prob) / TEMPERATURE + noise_of(*places[token])
        for token, log_prob in zip(ids.tolist(), log_probs, strict=True)
    }
    best = sorted(scores, key=lambda token: -scores[token])
    assert ranked.tolist() == best
    shares = np.exp([scores[token] for token in best])
    np.testing.assert_allclose(np.exp(given), shares / shares.sum(), rtol=1e-5)
    first, _ = noise.rank([B], ids, log_probs, 1)
    assert first.tolist() == best[:1]


def test_a_committed_token_s_place_is_never_asked_about() -> None:
    ids = np.array([A, B], dtype=np.int32)
    log_probs = np.log(np.array([0.5, 0.5], dtype=np.float32))
    ranked, _ = TargetNoise(TOKENS, T_C, CHOICE).rank([], ids, log_probs, 2)
    best = max((A, B), key=lambda token: noise_of({A: T_CA, B: T_B}[token], NEXT))
    assert ranked[0] == best


def test_a_model_of_the_target_s_tokens_under_other_ids_draws_as_the_target_does() -> None:
    size = 6
    names = "abcdef"
    own, targets = letters(*names), letters(*reversed(names))
    stage: Any = FakeModelStage(size + 1, block_size=4)
    drafter = ModelDrafter(
        stage,
        ModelInfo(Path(), "fake", size + 1, 8, 1, 1, 8, 4096, (), None),
        options=ModelOptions(block_size=4, num_blocks=40, num_tokens=4),
        vocabulary=WrittenVocabulary(own, targets, size + 1, size + 1),
    )
    text = [2, 5, 0, 1]
    ids = np.array(text, dtype=np.int32)
    drafter.open(DraftRequest("r", ids, len(text), TEMPERATURE, SEED))
    [proposal] = drafter.propose([Query("r", len(text), 8)])
    drawn = [size - 1 - token for token in text]
    expected = []
    for position in range(len(text), len(text) + 4):
        ranked = stage._top_ids(drawn, size + 1).tolist()
        scores = {
            token: np.log(0.5) * (1 + rank) / TEMPERATURE
            + noise_of(size - 1 - token if token < size else size, position)
            for rank, token in enumerate(ranked)
        }
        drawn.append(max(scores, key=lambda token: scores[token]))
        expected.append(size - 1 - drawn[-1] if drawn[-1] < size else size)
    ends = expected.index(size) + 1 if size in expected else 4
    assert proposal.tokens.tolist() == expected[:ends]
