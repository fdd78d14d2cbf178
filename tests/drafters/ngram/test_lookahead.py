"""Lookahead decoding against the example of its window, and against a target it learns."""

from typing import Any

import numpy as np
import pytest
from draftline.core.errors import ConfigError, DrafterError
from draftline.core.proposals import MAX_PROBE_ROWS, Commit, DraftRequest, Probe, Proposal, Query
from draftline.drafters.ngram.lookahead import ForwardDictionary, LookaheadDrafter, LookaheadOptions
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.replay import matching_prefix

CUR, A1, A2, B0, B1, B2, C0, C1, C2, N0, N1, N2 = range(20, 32)


def opened(text: list[int], **options: Any) -> LookaheadDrafter:
    drafter = LookaheadDrafter(options=LookaheadOptions(**options))
    drafter.open(DraftRequest("r", np.array(text, dtype=np.int32), len(text), 0.0, seed=4))
    return drafter


def propose(drafter: LookaheadDrafter, length: int, max_nodes: int = 50) -> Proposal:
    [proposal] = drafter.propose([Query("r", length, max_nodes)])
    proposal.check(100)
    return proposal


def commit(drafter: LookaheadDrafter, base: int, tokens: list[int], best: Any = None) -> None:
    answers = None if best is None else np.array(best, dtype=np.int32)[:, None]
    drafter.observe([Commit("r", base, np.array(tokens, dtype=np.int32), answers)])


def steady(*text: int, **options: Any) -> LookaheadDrafter:
    """N=4, W=3; level 0 is the root, a1, a2, level 1 is b0 b1 b2, level 2 is c0 c1 c2."""
    drafter = opened(list(text), ngram=4, window=3, **options)
    window = drafter._requests._states["r"].window
    assert window is not None
    window._levels = [[A1, A2], [B0, B1, B2], [C0, C1, C2]]
    return drafter


def test_the_worked_example() -> None:
    """The example of docs/drafters.md, "Lookahead": the root at position 10."""
    drafter = steady(*range(10), CUR)
    probe = propose(drafter, 11).probe
    assert probe is not None
    assert probe.tokens.tolist() == [A1, A2, B0, B1, B2, C0, C1, C2]
    assert (10 + probe.offsets).tolist() == [11, 12, 11, 12, 13, 12, 13, 14]
    tokens = probe.tokens.tolist()
    sees = {tokens[row]: set(probe.tokens[probe.mask[row]].tolist()) for row in range(8)}
    assert sees[A2] == {A1, A2}
    assert sees[B1] == {A1, B1}
    assert sees[C2] == {A1, A2, B2, C2}
    assert probe.tokens[probe.wanted].tolist() == [C0, C1, C2]
    assert probe.top_k == 1
    commit(drafter, 11, [A1], best=[N0, N1, N2])
    after_a1 = propose(drafter, 12)
    assert after_a1.tokens.tolist() == [B1, C1, N1]
    assert after_a1.parents.tolist() == [-1, 0, 1]
    assert after_a1.probe is not None
    assert after_a1.probe.tokens.tolist() == [B1, B2, C0, C1, C2, N0, N1, N2]
    commit(drafter, 12, [CUR])
    assert propose(drafter, 13).tokens.tolist() == [B0, C0, N0]
    commit(drafter, 13, [A2])
    assert propose(drafter, 14).tokens.tolist() == [B2, C2, N2]
    commit(drafter, 14, [N2])
    assert propose(drafter, 15).tokens.tolist() == []


def test_a_dropped_probe_leaves_the_window_as_it_is() -> None:
    drafter = steady(CUR)
    commit(drafter, 1, [7, 8])
    probe = propose(drafter, 3).probe
    assert probe is not None
    assert probe.tokens.tolist() == [A1, A2, B0, B1, B2, C0, C1, C2]
    commit(drafter, 3, [8], best=[N0, N1, N2])
    # The root was 8 when this probe was computed.
    assert propose(drafter, 4).tokens.tolist() == [B0, C0, N0]


@pytest.mark.parametrize("answers", [1, 4])
def test_answers_to_another_probe_are_refused(answers: int) -> None:
    with pytest.raises(DrafterError, match="3 were wanted"):
        commit(steady(CUR), 1, [6], best=[N0] * answers)


def test_guesses_are_the_latest_ngrams_of_the_last_token() -> None:
    drafter = steady(CUR, guess_set_size=2)
    state = drafter._requests._states["r"]
    for ngram in [(CUR, 1, 2, 3), (CUR, 1, 2, 4), (CUR, 1, 2, 3), (CUR, 5, 6, 7), (9, 8, 8, 8)]:
        state._ngrams.add(ngram[0], ngram[1:])
    proposal = propose(drafter, 1)
    assert proposal.tokens.tolist() == [5, 6, 7, 1, 2, 3]
    assert proposal.parents.tolist() == [-1, 0, 1, -1, 3, 4]
    assert propose(drafter, 1, max_nodes=4).tokens.tolist() == [5, 6, 7, 1]


def test_no_nodes_no_probe() -> None:
    nothing = propose(steady(CUR), 1, max_nodes=0)
    assert nothing.is_empty


def test_the_text_is_a_source_only_where_it_is_asked_for() -> None:
    text = [1, 2, 3, 4, 9, 1]
    assert propose(opened(text, ngram=3), 6).tokens.tolist() == []
    drafter = opened(text, ngram=3, pool_from_prompt=True)
    assert propose(drafter, 6).tokens.tolist() == [2, 3]
    commit(drafter, 6, [5, 6, 1])
    assert propose(drafter, 9).tokens.tolist() == [5, 6, 2, 3]


def likeliest(probe: Probe, text: list[int]) -> list[int]:
    """What a target that always counts up by one modulo 10 says after the wanted rows."""
    found = []
    for row in probe.wanted.tolist():
        seen = np.flatnonzero(probe.mask[row])
        # The target reads a text without gaps, the root included.
        assert sorted(probe.offsets[seen].tolist()) == list(range(1, probe.offsets[row] + 1))
        last = seen[np.argmax(probe.offsets[seen])]
        assert text
        found.append((int(probe.tokens[last]) + 1) % 10)
    return found


@pytest.mark.parametrize(("ngram", "window"), [(3, 3), (4, 3), (5, 7)])
def test_a_target_that_forgets_is_learned_and_a_whole_guess_brings_its_bonus(
    ngram: int, window: int
) -> None:
    """Once every token began an n-gram, each step commits N tokens: N-1 guessed and the bonus."""
    drafter = opened([0, 7, 3, 9, 4], ngram=ngram, window=window)
    text, steps = [0, 7, 3, 9, 4], []
    for _ in range(60):
        proposal = propose(drafter, len(text))
        probe = proposal.probe
        assert probe is not None
        said = [(text[-1] + 1 + step) % 10 for step in range(2 * ngram)]
        accepted = matching_prefix(proposal, np.array(said, dtype=np.int32))
        commit(drafter, len(text), said[: accepted + 1], likeliest(probe, text))
        text += said[: accepted + 1]
        steps.append(accepted + 1)
    assert steps[: ngram - 2] == [1] * (ngram - 2)
    assert steps[-10:] == [ngram] * 10


ngrams = st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=30)


@given(ngrams, st.integers(1, 4))
def test_the_dictionary_of_ngrams_of_one_length_is_lookaheads_pool(
    found: list[tuple[int, int, int]], capacity: int
) -> None:
    """A list for each token: what comes again moves to the tail, the head goes when it is full."""
    forward = ForwardDictionary(capacity, max_keys=10)
    pool: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in found:
        forward.add(first, tuple(rest))
        kept = pool.setdefault(first, [])
        if tuple(rest) in kept:
            kept.remove(tuple(rest))
        elif len(kept) == capacity:
            del kept[0]
        kept.append(tuple(rest))
    for first in range(3):
        assert list(forward.continuations(first)) == pool.get(first, [])[::-1]


def test_the_window_follows_the_seed() -> None:
    text = np.arange(30, dtype=np.int32)
    probes: list[list[int]] = []
    for seed in (1, 1, 2):
        drafter = LookaheadDrafter()
        drafter.open(DraftRequest("r", text, 30, 0.8, seed))
        probe = propose(drafter, 30).probe
        assert probe is not None
        probes.append(probe.tokens.tolist())
    assert probes[0] == probes[1] != probes[2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ngram", 2),
        ("window", 0),
        ("guess_set_size", -1),
        ("max_keys", 0),
        ("pool_from_prompt", 1),
        ("window", 17),
        ("window", MAX_PROBE_ROWS + 1),
    ],
)
def test_wrong_options_are_named(field: str, value: object) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError) as caught:
        LookaheadOptions(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(("ngram", "window"), [(3, 1), (5, 15), (8, 1), (16, 1)])
def test_windows_that_are_allowed_have_room_at_every_step(ngram: int, window: int) -> None:
    drafter = opened([1, 2], ngram=ngram, window=window)
    for base in range(2, 2 + ngram):
        probe = propose(drafter, base).probe
        assert probe is not None
        probe.check(100, MAX_PROBE_ROWS)
        commit(drafter, base, [1], best=[3] * len(probe.wanted))
