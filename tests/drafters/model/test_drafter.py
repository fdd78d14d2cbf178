"""The model drafter against a model that is a distribution over the whole text it sees in its KV
cache.
"""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftline.core.errors import ConfigError
from draftline.core.proposals import LEVEL_SHARE, Commit, DraftRequest, Proposal, Query
from draftline.drafters.model.drafter import ModelDrafter
from draftline.drafters.model.options import ModelOptions
from draftline.drafters.model.stopping_rules import FIRST_THRESHOLD
from draftline.models.load.model_info import ModelInfo
from support.fakes.fake_model_stage import FakeModelStage, distribution, plain_chain

VOCAB, SEED = 50, 12
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


class Bench:
    """A drafter on a fake stage, one request `r` and its text."""

    def __init__(self, text: list[int], max_context_len: int = 64, **options: Any) -> None:
        chosen = ModelOptions(**{"block_size": 4, "num_tokens": 4, "num_blocks": 20, **options})
        self.now = 0.0
        self.stage: Any = FakeModelStage(VOCAB, chosen.block_size)
        info: Any = _info(max_context_len)
        self.drafter = ModelDrafter(self.stage, info, "model", chosen, clock=lambda: self.now)
        self.text = list(text)
        self.open("r", text)

    def open(self, request_id: str, text: list[int], temperature: float = 0.0) -> None:
        tokens = np.array(text, dtype=np.int32)
        self.drafter.open(DraftRequest(request_id, tokens, len(text), temperature, SEED))

    def propose(self, max_nodes: int = 20, deadline: float | None = None) -> Proposal:
        self.stage.steps.clear()
        [proposal] = self.drafter.propose([Query("r", len(self.text), max_nodes)], deadline)
        return proposal

    def commit(self, tokens: list[int]) -> None:
        base = len(self.text)
        self.drafter.observe([Commit("r", base, np.array(tokens, dtype=np.int32))])
        self.text += tokens

    def rows(self) -> list[int]:
        """Rows of each pass of the last proposal."""
        return [len(step.token_ids) for step in self.stage.steps]

    def chain(self, num_tokens: int) -> list[int]:
        return plain_chain(self.text, SEED, VOCAB, num_tokens)


def _info(max_context_len: int) -> ModelInfo:
    return ModelInfo(Path(), "fake", VOCAB, 8, 1, 1, 8, max_context_len, (), None)


def test_it_draws_the_model_s_chain_with_the_request_s_noise() -> None:
    bench = Bench(TEXT)
    proposal = bench.propose()
    assert proposal.tokens.tolist() == bench.chain(4)
    assert proposal.parents.tolist() == [-1, 0, 1, 2]
    expected = [distribution(bench.text + bench.chain(4)[:k], SEED, VOCAB)[1] for k in range(4)]
    np.testing.assert_allclose(proposal.log_probs, expected, rtol=1e-6)
    [sampling] = [bench.stage.steps[1].sampling]
    assert sampling.seed.tolist() == [SEED]
    assert sampling.position.tolist() == [len(TEXT) + 1]
    unfiltered = (sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p)
    assert [values.tolist() for values in unfiltered] == [[0], [1], [0], [1]]
    assert all(step.edits == () for step in bench.stage.steps)


def test_after_full_acceptance_two_tokens_are_fed() -> None:
    bench = Bench(TEXT)
    accepted = bench.propose().tokens.tolist()
    bench.commit([*accepted, 7])
    assert bench.propose().tokens.tolist() == bench.chain(4)
    assert bench.rows() == [2, 1, 1, 1]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_after_a_rejection_one_token_is_fed(accepted: int) -> None:
    bench = Bench(TEXT)
    drawn = bench.propose().tokens.tolist()
    wrong = (drawn[accepted] + 1) % VOCAB
    bench.commit([*drawn[:accepted], wrong])
    assert bench.propose().tokens.tolist() == bench.chain(4)
    assert bench.rows() == [1, 1, 1, 1]


def test_tokens_of_other_drafters_are_caught_up() -> None:
    bench = Bench(TEXT)
    drawn = bench.propose().tokens.tolist()
    bench.commit([drawn[0], (drawn[1] + 1) % VOCAB, 8, 8, 8])
    assert bench.propose().tokens.tolist() == bench.chain(4)
    assert bench.rows() == [4, 1, 1, 1]
    bench.commit([5])
    bench.commit([6, 7])
    assert bench.propose().tokens.tolist() == bench.chain(4)
    assert bench.rows() == [3, 1, 1, 1]


def test_proposing_again_changes_nothing() -> None:
    bench = Bench(TEXT)
    first = bench.propose()
    assert bench.propose(max_nodes=2).tokens.tolist() == first.tokens.tolist()[:2]
    assert bench.propose().tokens.tolist() == first.tokens.tolist()
    bench.commit([*first.tokens.tolist(), 7])
    assert bench.propose().tokens.tolist() == bench.chain(4)


def test_prompts_are_fed_in_chunks() -> None:
    bench = Bench(TEXT, prefill_chunk=3)
    assert bench.propose().tokens.tolist() == bench.chain(4)
    assert bench.rows() == [3, 3, 2, 1, 1, 1]


def test_short_feeds_do_not_wait_for_long_prompts() -> None:
    bench = Bench(TEXT, prefill_chunk=4)
    bench.propose()
    bench.commit([7])
    bench.open("long", list(range(20)))
    bench.stage.steps.clear()
    queries = [Query("long", 20, 4), Query("r", len(bench.text), 4)]
    long, short = bench.drafter.propose(queries)
    assert short.tokens.tolist() == bench.chain(4)
    assert long.tokens.tolist() == plain_chain(list(range(20)), SEED, VOCAB, 4)
    # Three rows of each pass are left to the prompt while the other request draws.
    assert bench.rows()[:4] == [4, 4, 4, 4]
    assert bench.stage.steps[3].request_starts.tolist() == [0, 1, 4]


def test_the_deadline_cuts_a_chain_and_a_prompt_goes_on_later() -> None:
    bench = Bench(TEXT, prefill_chunk=3)
    assert len(bench.propose(deadline=0.0).tokens) == 0
    assert bench.rows() == []
    steps = bench.stage.run

    def one_second_a_pass(step: Any, hidden: None) -> Any:
        bench.now += 1.0
        return steps(step, hidden)

    bench.stage.run = one_second_a_pass
    assert len(bench.propose(deadline=bench.now + 2).tokens) == 0
    assert bench.rows() == [3, 3]
    assert bench.propose(deadline=bench.now + 3).tokens.tolist() == bench.chain(3)
    assert bench.rows() == [2, 1, 1]


def test_requests_do_not_disturb_one_another() -> None:
    bench = Bench(TEXT)
    texts = {"r": TEXT, "a": [1, 2, 3], "b": [9] * 11}
    bench.open("a", texts["a"])
    bench.open("b", texts["b"])
    queries = [Query(name, len(text), 4) for name, text in texts.items()]
    for order in (queries, queries[::-1]):
        proposals = bench.drafter.propose(order)
        for query, proposal in zip(order, proposals, strict=True):
            expected = plain_chain(texts[query.request_id], SEED, VOCAB, 4)
            assert proposal.tokens.tolist() == expected


def test_a_full_cache_gives_empty_proposals_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(TEXT, num_blocks=3)
    bench.open("more", TEXT)
    bench.open("even more", TEXT)
    queries = [Query(name, len(TEXT), 4) for name in ("r", "more", "even more")]
    with caplog.at_level(logging.WARNING):
        proposals = bench.drafter.propose(queries)
        bench.drafter.propose(queries)
    assert [len(proposal.tokens) for proposal in proposals] == [4, 0, 0]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    bench.drafter.close("r")
    [proposal] = bench.drafter.propose([queries[1]])
    assert proposal.tokens.tolist() == bench.chain(4)


def test_a_request_that_cannot_grow_gives_its_blocks_to_others() -> None:
    bench = Bench(TEXT, num_blocks=5)
    bench.propose()
    bench.open("more", TEXT[:4])
    assert len(bench.drafter.propose([Query("more", 4, 4)])[0].tokens) == 4
    bench.commit([1] * 6)
    assert len(bench.propose().tokens) == 0
    assert bench.drafter._cache.num_free == 3
    bench.drafter.close("more")
    assert bench.propose().tokens.tolist() == bench.chain(4)


def test_closing_and_reopening_leak_no_block() -> None:
    bench = Bench(TEXT)
    for _ in range(3):
        bench.propose()
        bench.open("r", TEXT)
    bench.propose()
    bench.drafter.close("r")
    bench.drafter.close("r")
    assert bench.drafter._cache.num_free == 20


def test_the_chain_stays_in_the_model_s_context() -> None:
    bench = Bench(TEXT, max_context_len=len(TEXT) + 2)
    assert bench.propose().tokens.tolist() == bench.chain(2)
    bench.commit([1, 2])
    assert len(bench.propose().tokens) == 0


def test_ids_that_the_model_lacks_end_its_drafting() -> None:
    bench = Bench(TEXT)
    bench.commit([VOCAB])
    assert len(bench.propose().tokens) == 0
    assert bench.rows() == []


def test_an_unsure_token_is_the_last() -> None:
    bench = Bench(TEXT, num_tokens=12, stop="confidence")
    chain = bench.chain(12)
    probs = [math.exp(distribution(TEXT + chain[:k], SEED, VOCAB)[1]) for k in range(12)]
    unsure = next(k for k, prob in enumerate(probs) if prob < FIRST_THRESHOLD)
    assert unsure < 11
    assert bench.propose().tokens.tolist() == chain[: unsure + 1]


def test_a_chain_ends_where_another_token_does_not_save_its_time() -> None:
    """A pass takes a second here; the first token is drawn whatever it is worth."""
    bench = Bench(TEXT, num_tokens=8)
    run = bench.stage.run

    def timed(*args: Any) -> Any:
        bench.now += 1.0
        return run(*args)

    bench.stage.run = timed
    whole = bench.propose()
    for _ in range(60):
        bench.propose()
    num_checked = 0
    probs = np.exp(whole.log_probs.astype(np.float64))
    # As much of the text as went through the last token is taken to go through the next.
    expected = np.cumprod(probs) * probs
    for num_tokens in range(1, 8):
        if expected[num_tokens - 1] < expected[: num_tokens - 1].min(initial=np.inf):
            token_s = 1.0 / (LEVEL_SHARE * expected[num_tokens - 1] * 1.001)
            query = Query("r", len(TEXT), 20, token_s=token_s)
            [proposal] = bench.drafter.propose([query])
            assert proposal.tokens.tolist() == whole.tokens[:num_tokens].tolist()
            num_checked += 1
    assert num_checked >= 3


def test_a_distribution_that_is_uncertain_ends_the_chain() -> None:
    bench = Bench(TEXT, num_tokens=6, stop="svip")
    bench.stage.entropies = [0.1, 0.2, 0.7, 0.1]
    assert bench.propose().tokens.tolist() == bench.chain(3)
    assert bench.rows() == [len(TEXT), 1, 1]


def test_chains_grow_where_they_are_accepted_and_shrink_where_they_are_not() -> None:
    bench = Bench(TEXT, num_tokens=8, max_context_len=200, num_blocks=60, stop="heuristic")
    lengths = []
    for accepted in (8, 3, 0, 0, 5):
        drawn = bench.propose().tokens.tolist()
        lengths.append(len(drawn))
        bench.commit([*drawn[:accepted], VOCAB - 1])
        # What comes from others in between belongs to no draft.
        bench.commit([1, 2])
    assert lengths == [8, 8, 7, 6, 5]
    assert len(bench.propose().tokens) == 7


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_tokens", 0),
        ("stop", "never"),
        ("num_blocks", 0),
        ("block_size", 2.5),
        ("prefill_chunk", 0),
        ("device", "gpu"),
        ("dtype", "int8"),
        ("enforce_eager", 1),
    ],
)
def test_wrong_options_are_named(field: str, value: object) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError) as caught:
        ModelOptions(**options)
    assert caught.value.field == field
