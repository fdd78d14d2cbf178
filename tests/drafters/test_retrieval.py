"""The retrieval drafter: what it asks, and how it ranks the answer."""

from dataclasses import replace

import numpy as np
import pytest
from draftline.core.arrays import Int32
from draftline.core.errors import ConfigError, StoreError
from draftline.core.interfaces import (
    CREDITED,
    DAMAGED,
    OUTCOMES,
    Ended,
    LearningDrafter,
    Subtree,
    empty_subtree,
)
from draftline.core.proposals import Commit, DraftRequest, Query
from draftline.core.sampling import gumbel
from draftline.drafters.retrieval import RetrievalDrafter, RetrievalOptions
from support.fakes.fake_lookup import FakeLookup


def int32(*values: int) -> Int32:
    return np.array(values, dtype=np.int32)


def subtree(match_len: int = 5) -> Subtree:
    """Root has children 7 (0.5), 8 (0.4) and 9 (0.1); below 7 stands 3 (0.8)."""
    log_probs = np.log(np.array([0.5, 0.4, 0.8, 0.1])).astype(np.float32)
    return Subtree(int32(7, 3, 8, 9), int32(-1, 0, -1, -1), log_probs[[0, 2, 1, 3]], match_len)


def request(length: int, temperature: float = 0.0, request_id: str = "r") -> DraftRequest:
    text = np.arange(length, dtype=np.int32)
    return DraftRequest(request_id, text, length, temperature, seed=6, namespace="tenant")


def test_it_asks_with_the_last_tokens_of_each_request_in_one_lookup() -> None:
    lookup = FakeLookup(subtree())
    drafter = RetrievalDrafter(lookup, options=RetrievalOptions(context_len=4, max_nodes=3))
    drafter.open(request(10))
    drafter.open(request(2, request_id="short"))
    drafter.propose([Query("r", 10, 50), Query("short", 2, 2)])
    assert lookup.asked == [([6, 7, 8, 9], "tenant", 3), ([0, 1], "tenant", 2)]
    drafter.observe([Commit("r", 10, int32(40, 41))])
    drafter.propose([Query("r", 12, 1)])
    assert lookup.asked[-1] == ([8, 9, 40, 41], "tenant", 1)


def test_greedy_takes_the_answer_in_order_of_path_probability() -> None:
    drafter = RetrievalDrafter(FakeLookup(subtree()))
    drafter.open(request(10))
    [proposal] = drafter.propose([Query("r", 10, 4)])
    # Paths: 7 0.5, then 7-3 and 8 with 0.4 each (the first stays first), 9 0.1.
    assert proposal.tokens.tolist() == [7, 3, 8, 9]
    assert proposal.parents.tolist() == [-1, 0, -1, -1]
    np.testing.assert_allclose(np.exp(proposal.log_probs), [0.5, 0.8, 0.4, 0.1], rtol=1e-5)


def test_with_a_temperature_more_is_asked_and_the_noise_ranks() -> None:
    lookup = FakeLookup(subtree())
    drafter = RetrievalDrafter(lookup, options=RetrievalOptions(oversample=4))
    firsts: set[int] = set()
    for length in range(10, 40):
        drafter.open(request(length, temperature=1.0))
        [proposal] = drafter.propose([Query("r", length, 1)])
        noise = gumbel(int32(6), int32(length), int32(7, 8, 9))
        best = int32(7, 8, 9)[np.argmax(np.log([0.5, 0.4, 0.1]) + noise)]
        assert proposal.tokens.tolist() == [best]
        firsts.add(int(best))
    assert lookup.asked[0][2] == 4
    assert firsts == {7, 8, 9}


def test_short_matches_are_not_proposed() -> None:
    drafter = RetrievalDrafter(FakeLookup(subtree(match_len=2)))
    drafter.open(request(5))
    assert len(drafter.propose([Query("r", 5, 9)])[0].tokens) == 4
    drafter = RetrievalDrafter(
        FakeLookup(subtree(match_len=2)), options=RetrievalOptions(min_match_len=3)
    )
    drafter.open(request(5))
    assert len(drafter.propose([Query("r", 5, 9)])[0].tokens) == 0


def test_nothing_found_and_nothing_asked() -> None:
    lookup = FakeLookup(empty_subtree())
    drafter = RetrievalDrafter(lookup)
    drafter.open(request(5))
    assert len(drafter.propose([Query("r", 5, 9)])[0].tokens) == 0
    assert drafter.propose([Query("r", 5, 0)])[0].source == "retrieval"
    assert len(lookup.asked) == 1


def test_what_the_lookup_raises_comes_out() -> None:
    class BrokenLookup(FakeLookup):
        def lookup(self, *_: object) -> list[Subtree]:
            raise StoreError("segment 3 is corrupt")

    drafter = RetrievalDrafter(BrokenLookup(subtree()))
    drafter.open(request(5))
    with pytest.raises(StoreError, match="segment 3"):
        drafter.propose([Query("r", 5, 9)])


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("context_len", {"context_len": 0}),
        ("max_nodes", {"max_nodes": 0}),
        ("min_match_len", {"context_len": 4, "min_match_len": 5}),
        ("oversample", {"oversample": 0}),
    ],
)
def test_wrong_options_are_named(field: str, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        RetrievalOptions(**options)
    assert caught.value.field == field


class Heard:
    """A learner that keeps what it hears."""

    def __init__(self) -> None:
        self.ended: list[Ended] = []
        self.counts: dict[str, int] = {}

    def learn(self, ended: Ended) -> None:
        self.ended.append(ended)
        self.counts = {"learned": len(self.ended), "credited": 2}


def learning(lookup: FakeLookup, **options: bool) -> tuple[RetrievalDrafter, Heard]:
    heard = Heard()
    options = {"learn": True} | options
    return RetrievalDrafter(lookup, options=RetrievalOptions(**options), learner=heard), heard


def test_an_ended_request_is_handed_on_with_its_accepted_runs() -> None:
    drafter, heard = learning(FakeLookup(subtree()))
    drafter.open(request(20))
    drafter.propose([Query("r", 20, 4)])
    drafter.observe([Commit("r", 20, int32(7, 3, 5))])
    drafter.propose([Query("r", 23, 4)])
    drafter.observe([Commit("r", 23, int32(1))])
    # Nothing was proposed for this step: the last proposal is not measured again.
    drafter.observe([Commit("r", 24, int32(8, 2))])
    assert heard.ended == []
    drafter.close("r")
    [ended] = heard.ended
    assert ended.namespace == "tenant"
    assert ended.tokens.tolist() == [*range(4, 20), 7, 3, 5, 1, 8, 2]
    assert ended.accepted == ((16, 18),)
    drafter.close("r")
    assert len(heard.ended) == 1


def test_what_was_generated_before_the_drafter_was_lost_is_learned_too() -> None:
    drafter, heard = learning(FakeLookup(subtree()))
    drafter.open(replace(request(20), prompt_len=18))
    drafter.observe([Commit("r", 20, int32(30))])
    drafter.close("r")
    assert heard.ended[0].tokens.tolist() == [*range(2, 20), 30]


def test_a_long_answer_is_cut() -> None:
    drafter, heard = learning(FakeLookup(subtree()))
    drafter.open(request(4))
    for start in range(4, 3004, 100):
        drafter.propose([Query("r", start, 4)])
        drafter.observe([Commit("r", start, np.full(100, 7, dtype=np.int32))])
    drafter.close("r")
    [ended] = heard.ended
    assert len(ended.tokens) == 2048
    assert max(stop for _, stop in ended.accepted) <= 2048


@pytest.mark.parametrize(
    ("opened", "outcome"),
    [
        (replace(request(20), store=False), "unstored"),
        (replace(request(20), namespace="shared"), "shared"),
        (replace(request(20), cache_salt="salt"), "salted"),
    ],
)
def test_what_may_not_be_learned_is_not(opened: DraftRequest, outcome: str) -> None:
    drafter, heard = learning(FakeLookup(subtree()))
    drafter.open(opened)
    drafter.propose([Query("r", 20, 4)])
    drafter.observe([Commit("r", 20, int32(7))])
    drafter.close("r")
    assert heard.ended == []
    counts = drafter.learning_counts
    assert {name: count for name, count in counts.items() if count} == {outcome: 1}


def test_counts_are_those_of_the_learner_and_its_own() -> None:
    drafter, _ = learning(FakeLookup(subtree()))
    assert isinstance(drafter, LearningDrafter)
    assert drafter.learning_counts == dict.fromkeys((*OUTCOMES, CREDITED, DAMAGED), 0)
    for store in (True, False):
        drafter.open(replace(request(20), store=store))
        drafter.observe([Commit("r", 20, int32(7))])
        drafter.close("r")
    counts = drafter.learning_counts
    assert (counts["learned"], counts["unstored"], counts["credited"]) == (1, 1, 2)
    assert learning(FakeLookup(subtree()), learn=False)[0].learning_counts == {}


def test_nothing_is_learned_without_the_option_or_without_an_answer() -> None:
    drafter, heard = learning(FakeLookup(subtree()), learn=False)
    drafter.open(request(20))
    drafter.observe([Commit("r", 20, int32(7))])
    drafter.close("r")
    drafter, also_heard = learning(FakeLookup(subtree()))
    drafter.open(request(20))
    drafter.close("r")
    assert heard.ended == also_heard.ended == []
    with pytest.raises(ConfigError, match="learn: must be true or false"):
        RetrievalOptions(learn="off")  # pyright: ignore[reportArgumentType]
