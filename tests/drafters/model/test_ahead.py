"""Drafting ahead against a model that is a distribution over the whole text it sees in its KV
cache, and the choice of outcomes on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftline.core.arrays import ROOT
from draftline.core.errors import ConfigError, DrafterError
from draftline.core.logits_params import LogitsParams
from draftline.core.proposals import AheadQuery, Commit, DraftRequest, Proposal, Query
from draftline.core.tree.merge import reroot
from draftline.drafters.model.ahead.agreement import Agreement
from draftline.drafters.model.ahead.outcomes import Candidates, likeliest_outcomes
from draftline.drafters.model.drafter import ModelDrafter
from draftline.drafters.model.options import ModelOptions
from draftline.models.load.model_info import ModelInfo
from support.fakes.fake_model_stage import FakeModelStage, distribution, plain_chain

VOCAB, SEED = 50, 12
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


class Passes:
    """Says that it is over after so many passes."""

    def __init__(self, most: int) -> None:
        self.left = most

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


class Bench:
    """A drafter on a fake stage, one request `r` and its text."""

    def __init__(self, context_len: int = 64, logits: LogitsParams | None = None, **options: Any):
        given = {
            "block_size": 4,
            "num_tokens": 4,
            "num_blocks": 64,
            "ahead_outcomes": 40,
            **options,
        }
        self.stage: Any = FakeModelStage(VOCAB, given["block_size"])
        info = ModelInfo(Path(), "fake", VOCAB, 8, 1, 1, 8, context_len, (), None)
        self.drafter = ModelDrafter(self.stage, info, "model", ModelOptions(**given))
        self.text = list(TEXT)
        tokens = np.array(TEXT, dtype=np.int32)
        params = logits or LogitsParams()
        self.drafter.open(DraftRequest("r", tokens, 8, 0.0, SEED, logits_params=params))

    def propose(self) -> list[int]:
        self.stage.steps.clear()
        [proposal] = self.drafter.propose([Query("r", len(self.text), 20)])
        return proposal.tokens.tolist()

    def go_ahead(
        self, tokens: list[int], parents: list[int] | None = None, *, max_nodes: int = 20,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Proposal:  # fmt: skip
        """What is drafted while a tree, by default a chain, is computed."""
        self.stage.steps.clear()
        above = list(range(ROOT, len(tokens) - 1)) if parents is None else parents
        query = AheadQuery("r", len(self.text), max_nodes, int32(tokens), int32(above))
        [proposal] = self.drafter.propose_ahead([query], is_over)
        proposal.check(VOCAB)
        return proposal

    def commit(self, tokens: list[int]) -> None:
        self.drafter.observe([Commit("r", len(self.text), int32(tokens))])
        self.text += tokens

    def rows(self) -> list[int]:
        """Rows of each pass since the last proposal."""
        return [len(step.token_ids) for step in self.stage.steps]

    def ranked(self, path: list[int], count: int) -> list[int]:
        """The model's most probable tokens behind some tokens."""
        first, _ = distribution([*self.text, *path], 0, VOCAB)
        return [(first + rank) % VOCAB for rank in range(count)]

    def chain(self, *path: int, count: int = 4) -> list[int]:
        return plain_chain([*self.text, *path], SEED, VOCAB, count)


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def left_of(proposal: Proposal, *said: int) -> list[int]:
    """Tokens of what is left once these are committed."""
    left = reroot(proposal, int32(list(said)))
    return [] if left is None else left.tokens.tolist()


def test_outcomes_are_the_products_along_their_paths() -> None:
    def given(*pairs: tuple[int, float]) -> Candidates:
        probs = np.log([prob for _, prob in pairs]).astype(np.float32)
        return Candidates(int32([token for token, _ in pairs]), probs)

    # The root's child 1 has a child 5; 9 is a child that is not among the candidates.
    found = likeliest_outcomes(
        [1, 5, 9],
        [ROOT, 0, ROOT],
        [given((1, 0.6), (2, 0.3), (3, 0.1)), given((5, 0.6), (6, 0.4)), given((7, 1.0)),
         given((8, 1.0))],
        5,
    )  # fmt: skip
    assert [(one.node, one.token) for one in found] == [
        (1, 7),
        (ROOT, 2),
        (0, 6),
        (ROOT, 3),
        (2, 8),
    ]
    probs = [math.exp(one.log_prob) for one in found]
    np.testing.assert_allclose(probs, [0.36, 0.3, 0.24, 0.1, 0.1], rtol=1e-5)


def test_without_a_tree_they_are_the_tokens_after_the_text() -> None:
    found = likeliest_outcomes([], [], [Candidates(int32([4, 2]), np.zeros(2, np.float32))], 1)
    assert [(one.node, one.token) for one in found] == [(ROOT, 4)]


def halves(*tokens: int) -> Candidates:
    """Candidates that share all but a little, the first one a little more probable."""
    probs = np.linspace(0.55, 0.45, len(tokens)) * 2 / len(tokens)
    return Candidates(int32([*tokens]), np.log(probs).astype(np.float32))


def ask(agreement: Agreement, *tokens: int) -> list[Candidates]:
    """A chain of these tokens in flight, of which the drafter is never sure."""
    own = [halves(token, 40) for token in (*tokens, 41)]
    parents = list(range(ROOT, len(tokens) - 1))
    agreement.ask(AheadQuery("r", 8, 20, int32([*tokens]), int32(parents)), own)
    return own


def test_what_the_target_says_makes_of_the_drafter_s_doubts_what_they_are_worth() -> None:
    agreement = Agreement()
    first = np.exp(agreement.corrected(halves(1, 2)).log_probs)
    np.testing.assert_allclose(first, [0.55, 0.45], atol=0.1)
    for _ in range(30):
        ask(agreement, 1, 2, 3)
        # All is accepted, and what the drafter finds likeliest follows.
        agreement.said(Commit("r", 8, int32([1, 2, 3, 41])))
    likely, other = np.exp(agreement.corrected(halves(1, 2)).log_probs)
    assert likely > 0.9
    assert other < 0.1
    own = [agreement.corrected(one) for one in ask(agreement, 1, 2, 3)]
    [best, *_] = likeliest_outcomes([1, 2, 3], [ROOT, 0, 1], own, 4)
    assert (best.node, best.token) == (2, 41)
    # Nothing is learned from what nobody asked about, or behind what the tree does not have.
    agreement.forget("r")
    agreement.said(Commit("r", 8, int32([40])))
    ask(agreement, 1, 2, 3)
    agreement.said(Commit("r", 8, int32([40, 2, 3, 41])))
    after, _ = np.exp(agreement.corrected(halves(1, 2)).log_probs)
    assert 0.85 < after < likely


def test_it_drafts_behind_what_came_true_of_its_ranks() -> None:
    """With one outcome to draft behind, it is that of the target's habit, once this was seen."""
    bench = Bench(context_len=256, ahead_outcomes=1)

    def hit() -> bool:
        ahead = bench.go_ahead(bench.propose())
        said = bench.ranked([], 2)[1]
        left = left_of(ahead, said)
        bench.commit([said])
        return left == bench.chain()

    first = [hit() for _ in range(4)]
    for _ in range(20):
        hit()
    last = [hit() for _ in range(20)]
    assert sum(first) < 2
    assert sum(last) > 15


def test_behind_each_outcome_it_drafts_what_it_will_draft_when_it_is_said() -> None:
    bench = Bench()
    drawn = bench.propose()
    ahead = bench.go_ahead(drawn)
    # The last token of the text and the chain; then a row an outcome a pass.
    assert bench.rows() == [5, 40, 40, 40, 40]
    said = [token for token in bench.ranked([], 4) if token != drawn[0]][:2]
    for token in said:
        assert left_of(ahead, token) == bench.chain(token)
    path = [*drawn[:1], next(one for one in bench.ranked(drawn[:1], 2) if one != drawn[1])]
    assert left_of(ahead, *path) == bench.chain(*path)
    # What nobody guessed has no draft.
    assert left_of(ahead, bench.ranked([], 50)[-1]) == []


def test_the_draft_of_a_hit_is_gone_on_from_and_its_text_read_with_the_next_tree() -> None:
    bench = Bench()
    drawn = bench.propose()
    ahead = bench.go_ahead(drawn)
    path = [drawn[0], next(one for one in bench.ranked(drawn[:1], 2) if one != drawn[1])]
    chain = left_of(ahead, *path)
    bench.commit(path)
    again = bench.go_ahead(chain)
    # The first of the two is in the cache still.
    assert bench.rows()[0] == 1 + len(chain)
    token = next(one for one in bench.ranked([], 2) if one != chain[0])
    assert left_of(again, token) == bench.chain(token)
    bench.commit([token])
    assert bench.propose() == bench.chain()


@pytest.mark.parametrize("num_said", [0, 2, 4])
def test_after_an_outcome_that_was_not_guessed_the_accepted_nodes_are_in_the_cache(
    num_said: int,
) -> None:
    bench = Bench()
    drawn = bench.propose()
    bench.go_ahead(drawn)
    bench.commit([*drawn[:num_said], bench.ranked(drawn[:num_said], 30)[-1]])
    assert bench.propose() == bench.chain()
    assert bench.rows() == [1, 1, 1, 1]


def test_trees_of_other_drafters_are_read() -> None:
    bench = Bench()
    bench.propose()
    ahead = bench.go_ahead([7, 8, 9, 10], [ROOT, ROOT, 0, 1])
    token = bench.ranked([], 1)[0]
    assert left_of(ahead, token) == bench.chain(token)
    bench.commit([8, 10])
    assert bench.propose() == bench.chain()
    bare = bench.go_ahead([])
    assert left_of(bare, bench.ranked([], 1)[0]) == bench.chain(bench.ranked([], 1)[0])


def test_it_ends_between_passes_with_what_it_has() -> None:
    bench = Bench()
    drawn = bench.propose()
    token = next(one for one in bench.ranked([], 2) if one != drawn[0])
    for most, length in [(0, 0), (1, 0), (2, 1), (4, 3)]:
        ahead = bench.go_ahead(drawn, is_over=Passes(most))
        assert len(bench.rows()) == most
        assert left_of(ahead, token) == bench.chain(token)[:length]
    assert bench.propose() == bench.chain()


def test_drafts_are_as_long_as_they_may_be() -> None:
    bench = Bench(context_len=14)
    drawn = bench.propose()
    ahead = bench.go_ahead(drawn, max_nodes=3)
    token = next(one for one in bench.ranked([], 2) if one != drawn[0])
    assert left_of(ahead, token) == bench.chain(token, count=3)
    bench.commit([token, 1])
    # Four tokens have room behind these ten, and none behind an outcome below all of them.
    ahead = bench.go_ahead([5, 6, 7])
    token = bench.ranked([5, 6, 7], 1)[0]
    assert left_of(ahead, 5, 6, 7, token) == []
    assert bench.go_ahead([5, 6, 7, 8]).is_empty


def test_less_probable_outcomes_make_room_for_others_rows() -> None:
    bench = Bench(prefill_chunk=5)
    drawn = bench.propose()
    ahead = bench.go_ahead(drawn)
    assert bench.rows() == [5, 5, 5, 5, 5]
    token = next(one for one in bench.ranked([], 2) if one != drawn[0])
    assert left_of(ahead, token) == bench.chain(token)
    # Six rows do not fit.
    assert bench.go_ahead([*drawn, 7]).is_empty


def test_dynamic_trees_grow_behind_outcomes() -> None:
    bench = Bench(tree="dynamic", top_k=2, num_tokens=2)
    bench.propose()
    ahead = bench.go_ahead([7])
    token = next(one for one in bench.ranked([], 2) if one != 7)
    bench.commit([token])
    expected = bench.propose()
    assert len(expected) == 6
    assert left_of(ahead, token) == expected


def test_requests_whose_logits_are_edited_are_left_out() -> None:
    bench = Bench(logits=LogitsParams(repetition_penalty=1.2))
    drawn = bench.propose()
    assert bench.go_ahead(drawn).is_empty
    assert bench.rows() == []
    assert Bench().go_ahead([VOCAB + 1]).is_empty


def test_a_full_cache_keeps_what_it_has() -> None:
    bench = Bench(num_blocks=4)
    drawn = bench.propose()
    assert bench.go_ahead(drawn).is_empty
    bench.commit([*drawn, 7])
    assert bench.propose() == bench.chain()
    assert bench.rows()[0] == 2


def test_blocks_of_drafts_are_given_back() -> None:
    bench = Bench(num_blocks=14, ahead_outcomes=5)
    for _ in range(5):
        drawn = bench.propose()
        ahead = bench.go_ahead(drawn)
        assert not ahead.is_empty
        bench.commit([(drawn[0] + 1) % VOCAB])
    bench.drafter.close("r")


def test_chains_are_judged_where_they_are_verified() -> None:
    bench = Bench(stop="heuristic", num_tokens=4)
    bench.propose()
    drawn = bench.propose()
    ahead = bench.go_ahead(drawn)
    token = next(one for one in bench.ranked([], 2) if one != drawn[0])
    chain = left_of(ahead, token)
    assert len(chain) == 4
    # Nothing of the first chain is right, and of the second one only the first token is.
    bench.commit([token])
    bench.commit([chain[0], (chain[1] + 1) % VOCAB])
    assert len(bench.propose()) == 2


def test_unknown_requests_are_errors() -> None:
    bench = Bench()
    with pytest.raises(DrafterError, match="not open"):
        bench.drafter.propose_ahead([AheadQuery("x", 8, 4, int32([]), int32([]))], lambda: False)
    with pytest.raises(ConfigError, match="ahead_outcomes"):
        ModelOptions(ahead_outcomes=0)
