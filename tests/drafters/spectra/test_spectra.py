"""SPECTRA-CORE: guesses from the text and from the pool, every switch."""

from typing import Any

import numpy as np
import pytest
from draftline.core.errors import ConfigError, DrafterError
from draftline.core.proposals import MAX_PROBE_ROWS, Commit, DraftRequest, Proposal, Query
from draftline.drafters.spectra.drafter import PAPER, SpectraDrafter, SpectraOptions

WINDOW, NGRAM = 2, 3


def opened(text: list[int], prompt_len: int | None = None, **options: Any) -> SpectraDrafter:
    # Guesses as the paper has them, of N-1 tokens.
    drafter = SpectraDrafter(options=SpectraOptions(**{"guess_len": 0, **options}))
    length = len(text) if prompt_len is None else prompt_len
    drafter.open(DraftRequest("r", np.array(text, dtype=np.int32), length, 0.0, seed=4))
    return drafter


def propose(drafter: SpectraDrafter, length: int, max_nodes: int = 50) -> Proposal:
    [proposal] = drafter.propose([Query("r", length, max_nodes)])
    return proposal


def tokens_after(text: list[int], max_nodes: int = 50, **options: Any) -> list[int]:
    return propose(opened(text, pool=False, **options), len(text), max_nodes).tokens.tolist()


def commit(drafter: SpectraDrafter, base: int, tokens: list[int], probe_ids: Any = None) -> None:
    answers = None if probe_ids is None else np.array(probe_ids, dtype=np.int32)
    drafter.observe([Commit("r", base, np.array(tokens, dtype=np.int32), answers)])


# 1 is followed by 2 3 first and by 4 5 later; the pair 9 1 by 2.
TEXT = [9, 1, 2, 3, 8, 1, 4, 5, 9, 1]


def test_the_backward_guess_comes_first_then_the_latest_continuations() -> None:
    # N=3: backward follows 9 1 -> 2, 1 2 -> 3. Forward of 1: (4 5), then (2 3), already there.
    proposal = propose(opened(TEXT, pool=False, ngram=3), len(TEXT))
    assert proposal.tokens.tolist() == [2, 3, 4, 5]
    assert proposal.parents.tolist() == [-1, 0, -1, 2]


def test_each_part_can_be_switched_off() -> None:
    assert tokens_after(TEXT, ngram=3, backward=False) == [4, 5, 2, 3]
    assert tokens_after(TEXT, ngram=3, forward=False) == [2, 3]
    assert tokens_after(TEXT, ngram=3, forward=False, backward=False) == []
    assert tokens_after(TEXT, ngram=3, seed_from_prompt=False) == []


def test_sub_ngrams_know_shorter_suffixes() -> None:
    # Only 3 is repeated, with another token before it: a suffix of one token.
    text = [1, 2, 3, 4, 7, 7, 3]
    assert tokens_after(text, ngram=3, forward=False) == [4, 7]
    assert tokens_after(text, ngram=3, forward=False, sub_ngrams=False) == []


def test_the_number_of_guesses_is_capped() -> None:
    assert tokens_after(TEXT, ngram=3, max_guesses=1) == [2, 3]
    assert tokens_after(TEXT, ngram=3, max_nodes=3) == [2, 3, 4]
    # Without sub-n-grams 7 3 is unknown: no backward guess, and it takes no room.
    text = [1, 2, 3, 4, 5, 7, 7, 3]
    assert tokens_after(text, ngram=3, sub_ngrams=False, max_guesses=1) == [4, 5]
    assert tokens_after(TEXT, max_nodes=0) == []


def test_the_backward_guess_may_be_longer_than_the_ngrams() -> None:
    text = [1, 2, 3, 4, 5, 6, 1]
    assert tokens_after(text, ngram=3, guess_len=5) == [2, 3, 4, 5, 6]


def test_forward_guesses_may_come_first() -> None:
    """The listing's order: with room for two guesses, the backward one has none left."""
    forward_first = {"ngram": 3, "forward_first": True}
    assert tokens_after(TEXT, **forward_first) == [4, 5, 2, 3]
    assert tokens_after([*TEXT, 9, 1, 7, 9, 1], **forward_first, max_guesses=1) == [7, 9]
    assert tokens_after([*TEXT, 9, 1, 7, 9, 1], ngram=3, max_guesses=1) == [7, 9]
    # 5 4 is known, 3 4 came later: the backward guess differs from the latest continuation.
    text = [5, 4, 8, 3, 4, 6, 5, 4]
    assert tokens_after(text, ngram=3, max_guesses=1) == [8, 3]
    assert tokens_after(text, ngram=3, max_guesses=1, forward_first=True) == [6, 5]


def test_prefixes_may_take_room_of_their_own() -> None:
    """1 is followed by 2 3 4, then by 5 6 7: with all prefixes that is six continuations."""
    text = [1, 2, 3, 4, 9, 1, 5, 6, 7, 9, 9, 1]
    only_forward: dict[str, Any] = {"ngram": 4, "backward": False}
    assert tokens_after(text, **only_forward, max_guesses=2) == [5, 6, 7, 2, 3, 4]
    kept = only_forward | {"keep_prefixes": True}
    assert tokens_after(text, **kept, max_guesses=2) == [5, 6, 7]
    assert tokens_after(text, **kept) == [5, 6, 7, 2, 3, 4]
    assert tokens_after(text, **kept, capacity=3) == [5, 6, 7]


def test_the_papers_options_learn_from_the_pool_alone() -> None:
    options = SpectraOptions(**PAPER)
    assert options.window == 15
    drafter = SpectraDrafter(options=options)
    drafter.open(DraftRequest("r", np.array(TEXT, dtype=np.int32), 8, 0.0, seed=4))
    proposal = propose(drafter, len(TEXT))
    assert not len(proposal.tokens)
    assert proposal.probe is not None
    assert proposal.probe.top_k == MAX_PROBE_ROWS


def test_generated_text_is_learned_unless_switched_off() -> None:
    for learn, expected in ((True, [2]), (False, [])):
        drafter = opened([5], pool=False, learn_committed=learn)
        commit(drafter, 1, [1, 2])
        commit(drafter, 3, [7, 1])
        assert propose(drafter, 5).tokens.tolist()[:1] == expected


def test_only_the_generated_part_counts_as_generated_when_reopened() -> None:
    prompt, generated = [1, 2, 6, 6, 6], [8, 9, 8, 1]
    text = prompt + generated

    def known(**options: bool) -> list[int]:
        drafter = opened(text, len(prompt), pool=False, ngram=3, **options)
        return propose(drafter, len(text)).tokens.tolist()

    assert known(learn_committed=False) == [2, 6]
    assert known(seed_from_prompt=False) == []
    drafter = opened([*text, 8], len(prompt), pool=False, ngram=3, seed_from_prompt=False)
    assert propose(drafter, len(text) + 1).tokens.tolist() == [1, 8, 9, 8]


def pool_drafter(**options: Any) -> SpectraDrafter:
    """N=3, W=2 after its one warm-up step; knows nothing of its text [5, 6], so only the pool."""
    drafter = opened(
        [5], ngram=NGRAM, window=WINDOW, seed_from_prompt=False, learn_committed=False, **options
    )
    commit(drafter, 1, [6], probe_ids=[[11, 111]] * 2)
    return drafter


def test_the_pool_teaches_the_dictionaries() -> None:
    drafter = pool_drafter(refine_threshold=0.0)
    probe = propose(drafter, 2).probe
    assert probe is not None
    # Level 0: the root 6 and a prompt token; level 1: two predictions.
    assert probe.tokens.tolist() == [5, 11, 11]
    assert probe.wanted.tolist() == [1, 2]
    commit(drafter, 2, [6], probe_ids=[[21, 0], [22, 0]])
    # Column 0 completed (6 11 21): both the forward and the backward guess after 6.
    proposal = propose(drafter, 3)
    assert proposal.tokens.tolist() == [11, 21]
    assert proposal.probe is not None
    assert proposal.probe.tokens.tolist() == [11, 21, 22]


def test_a_dropped_probe_leaves_the_pool_as_it_is() -> None:
    drafter = pool_drafter(refine_threshold=0.0)
    before = propose(drafter, 2).probe
    commit(drafter, 2, [7, 8])
    after = propose(drafter, 4).probe
    assert before is not None
    assert after is not None
    assert after.tokens.tolist() == before.tokens.tolist()
    commit(drafter, 4, [8], probe_ids=[[21, 0], [22, 0]])
    # The root was 8 when this probe was computed.
    assert propose(drafter, 5).tokens.tolist() == [11, 21]


@pytest.mark.parametrize("answers", [1, 3])
def test_answers_to_another_probe_are_refused(answers: int) -> None:
    drafter = pool_drafter()
    with pytest.raises(DrafterError, match="2 were wanted"):
        commit(drafter, 2, [6], probe_ids=[[21, 0]] * answers)


def test_without_a_pool_there_are_no_probes() -> None:
    assert propose(opened([1, 2], pool=False), 2).probe is None
    assert propose(opened([1, 2]), 2).probe is not None
    assert propose(opened([1, 2]), 2, max_nodes=0).probe is None


@pytest.mark.parametrize(
    ("threshold", "explores"),
    [(1.0, True), (0.0, False)],
)
def test_exploring_takes_the_best_token_that_begins_no_ngram(
    threshold: float, explores: bool
) -> None:
    drafter = pool_drafter(refine_threshold=threshold)
    commit(drafter, 2, [6], probe_ids=[[21, 0], [22, 0]])
    # Now 6 begins an n-gram and 40 does not; next predictions prefer 6.
    commit(drafter, 3, [7], probe_ids=[[6, 40], [6, 40]])
    probe = propose(drafter, 4).probe
    assert probe is not None
    newest = probe.tokens[probe.wanted].tolist()
    assert newest == ([40, 40] if explores else [6, 6])


def test_all_offsets_learn_at_once_what_the_shift_would_bring_later() -> None:
    for all_offsets, expected in ((False, []), (True, [21])):
        drafter = pool_drafter(refine_threshold=0.0, all_offsets=all_offsets, backward=False)
        commit(drafter, 2, [11], probe_ids=[[21, 0], [21, 0]])
        assert propose(drafter, 3).tokens.tolist() == expected


def test_the_pool_follows_the_seed() -> None:
    text = np.arange(30, dtype=np.int32)
    probes: list[list[int]] = []
    for seed in (1, 1, 2):
        drafter = SpectraDrafter()
        drafter.open(DraftRequest("r", text, 30, 0.0, seed))
        probe = propose(drafter, 30).probe
        assert probe is not None
        probes.append(probe.tokens.tolist())
    assert probes[0] == probes[1] != probes[2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ngram", 2),
        ("window", 0),
        ("window", 40),
        ("max_guesses", "3"),
        ("refine_threshold", 1.5),
        ("pool", 1),
        ("sub_ngrams", None),
        ("guess_len", -1),
        ("explore_top_k", 65),
        ("forward_first", 1),
    ],
)
def test_wrong_options_are_named(field: str, value: object) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError) as caught:
        SpectraOptions(**options)
    assert caught.value.field == field
