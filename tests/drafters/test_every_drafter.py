"""What every drafter promises, whatever it proposes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftline.core.arrays import Int32
from draftline.core.errors import DrafterError
from draftline.core.interfaces import Drafter
from draftline.core.proposals import Commit, DraftRequest, Proposal, Query, TopNextTokens
from draftline.drafters.cascade.drafter import CascadeDrafter
from draftline.drafters.cascade.helper import Helper
from draftline.drafters.model.drafter import ModelDrafter
from draftline.drafters.model.options import ModelOptions
from draftline.drafters.ngram.anpd import AnpdDrafter, AnpdOptions
from draftline.drafters.ngram.lookahead import LookaheadDrafter, LookaheadOptions
from draftline.drafters.ngram.prompt_lookup import PromptLookupDrafter, PromptLookupOptions
from draftline.drafters.ngram.token_recycling import TokenRecyclingDrafter, TokenRecyclingOptions
from draftline.drafters.retrieval.drafter import RetrievalDrafter
from draftline.drafters.spectra.drafter import SpectraDrafter
from draftline.drafters.spectra.options import SpectraOptions
from draftline.drafters.suffix.drafter import SuffixDrafter, SuffixOptions
from draftline.models.load.model_info import ModelInfo
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes.fake_lookup import CountingLookup
from support.fakes.fake_model_stage import FakeModelStage

VOCAB = 6
INFO = ModelInfo(Path(), "fake", VOCAB, 8, 1, 1, 8, 4096, (), None)


def model_drafter() -> Drafter:
    stage: Any = FakeModelStage(VOCAB, block_size=4)
    return ModelDrafter(stage, INFO, options=ModelOptions(block_size=4, branch=1, prefill_chunk=5))


def cascade() -> Drafter:
    model: Any = model_drafter()
    bottom = AnpdDrafter()
    model.helper = Helper(bottom, 2)
    return CascadeDrafter("cascade", [model, bottom], [3, 4])


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "prompt_lookup": PromptLookupDrafter,
    "prompt_lookup, short window": lambda: PromptLookupDrafter(
        options=PromptLookupOptions(window=5)
    ),
    "spectra": SpectraDrafter,
    "spectra, tiny dictionaries": lambda: SpectraDrafter(
        options=SpectraOptions(capacity=2, max_keys=3, explore_top_k=4)
    ),
    "anpd": AnpdDrafter,
    "anpd, short window": lambda: AnpdDrafter(options=AnpdOptions(ngram=3, window=7)),
    "suffix": SuffixDrafter,
    "suffix, paths, short window": lambda: SuffixDrafter(
        options=SuffixOptions(tree=False, window=7, answer_tokens=5)
    ),
    "lookahead": LookaheadDrafter,
    "lookahead, tiny": lambda: LookaheadDrafter(
        options=LookaheadOptions(
            ngram=3, window=1, guess_set_size=2, max_keys=3, pool_from_prompt=True
        )
    ),
    "token_recycling": lambda: TokenRecyclingDrafter(
        options=TokenRecyclingOptions(num_top_next_tokens=4)
    ),
    "token_recycling, unshared": lambda: TokenRecyclingDrafter(
        options=TokenRecyclingOptions(num_top_next_tokens=VOCAB, share=False)
    ),
    "retrieval": lambda: RetrievalDrafter(CountingLookup(VOCAB)),
    "model": model_drafter,
    "cascade": cascade,
}
every_drafter = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS.keys())

texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
steps = st.lists(texts, max_size=6)
temperatures = st.sampled_from([0.0, 0.8])
budgets = st.integers(0, 20)
quick = settings(max_examples=40, deadline=None)


def request(name: str, text: list[int], prompt_len: int, temperature: float) -> DraftRequest:
    return DraftRequest(name, np.array(text, dtype=np.int32), prompt_len, temperature, seed=8)


def commit_of(name: str, base: int, tokens: list[int], proposal: Proposal | None = None) -> Commit:
    """A commit with some answers of the right shape to what the `proposal` asked for."""
    said = np.array(tokens, dtype=np.int32)
    if proposal is None:
        return Commit(name, base, said)
    first = int(proposal.tokens.sum())
    answer = heard = None
    if proposal.probe is not None:
        answer = some_ids(len(proposal.probe.wanted), proposal.probe.top_k, first)
    if proposal.num_top_next_tokens:
        tree = np.append(said[:1], proposal.tokens)
        heard = TopNextTokens(tree, some_ids(len(tree), proposal.num_top_next_tokens, first))
    return Commit(name, base, said, answer, heard)


def some_ids(num_rows: int, num_ids: int, first: int) -> Int32:
    ids = (np.arange(num_rows * num_ids) + first) % VOCAB
    return ids.astype(np.int32).reshape(num_rows, num_ids)


def same(one: Proposal, other: Proposal) -> bool:
    """Whether two proposals hold the same nodes."""
    return (
        one.tokens.tolist() == other.tokens.tolist()
        and one.parents.tolist() == other.parents.tolist()
        and np.allclose(one.log_probs, other.log_probs)
    )


@every_drafter
@quick
@given(prompt=texts, commits=steps, temperature=temperatures, budget=budgets)
def test_proposals_are_valid_bounded_and_repeatable(
    make: Callable[[], Drafter],
    prompt: list[int],
    commits: list[list[int]],
    temperature: float,
    budget: int,
) -> None:
    drafter = make()
    drafter.open(request("r", prompt, len(prompt), temperature))
    done = len(prompt)
    for tokens in [*commits, []]:
        [proposal] = drafter.propose([Query("r", done, budget)])
        proposal.check(VOCAB)
        assert len(proposal.tokens) <= budget
        assert proposal.source == drafter.name
        if proposal.probe is not None:
            proposal.probe.check(VOCAB + 2, max_rows=256)
        [again] = drafter.propose([Query("r", done, budget)])
        assert same(proposal, again)
        assert again.num_top_next_tokens == proposal.num_top_next_tokens
        assert (again.probe is None) == (proposal.probe is None)
        if again.probe is not None and proposal.probe is not None:
            assert again.probe.tokens.tolist() == proposal.probe.tokens.tolist()
        if tokens:
            drafter.observe([commit_of("r", done, tokens, proposal)])
            done += len(tokens)


@every_drafter
@quick
@given(prompt=texts, commits=steps, temperature=temperatures)
def test_reopening_equals_observing(
    make: Callable[[], Drafter], prompt: list[int], commits: list[list[int]], temperature: float
) -> None:
    """Without probe answers, which are lost with the drafter that asked for them."""
    one, other = make(), make()
    one.open(request("r", prompt, len(prompt), temperature))
    text = list(prompt)
    for tokens in commits:
        one.propose([Query("r", len(text), 8)])
        one.observe([commit_of("r", len(text), tokens)])
        text += tokens
    other.open(request("r", [1, 2, 3], 3, temperature))
    other.open(request("r", text, len(prompt), temperature))
    query = Query("r", len(text), 20)
    assert same(one.propose([query])[0], other.propose([query])[0])


@every_drafter
@quick
@given(prompts=st.lists(texts, min_size=2, max_size=4), order=st.randoms())
def test_the_order_of_a_batch_does_not_matter(
    make: Callable[[], Drafter], prompts: list[list[int]], order: Any
) -> None:
    drafter = make()
    for index, prompt in enumerate(prompts):
        drafter.open(request(str(index), prompt, len(prompt), 0.8 * (index % 2)))
    queries = [Query(str(index), len(prompt), 9) for index, prompt in enumerate(prompts)]
    expected = {
        query.request_id: proposal
        for query, proposal in zip(queries, drafter.propose(queries), strict=True)
    }
    commits = [commit_of(query.request_id, query.committed_len, [2, 1]) for query in queries]
    order.shuffle(queries)
    order.shuffle(commits)
    for query, proposal in zip(queries, drafter.propose(queries), strict=True):
        assert same(proposal, expected[query.request_id])
    drafter.observe(commits)
    for index, prompt in enumerate(prompts):
        alone = make()
        alone.open(request(str(index), prompt, len(prompt), 0.8 * (index % 2)))
        alone.propose([Query(str(index), len(prompt), 9)])
        alone.observe([commit_of(str(index), len(prompt), [2, 1])])
        query = Query(str(index), len(prompt) + 2, 9)
        assert same(drafter.propose([query])[0], alone.propose([query])[0])


@every_drafter
def test_queries_and_commits_must_fit_the_state(make: Callable[[], Drafter]) -> None:
    drafter = make()
    drafter.open(request("r", [1, 2], 2, 0.0))
    with pytest.raises(DrafterError, match="not open"):
        drafter.propose([Query("other", 2, 4)])
    with pytest.raises(DrafterError, match="2 committed tokens here, 3 there"):
        drafter.propose([Query("r", 3, 4)])
    with pytest.raises(DrafterError, match="2 committed tokens here, 1 there"):
        drafter.observe([commit_of("r", 1, [1])])
    with pytest.raises(DrafterError, match="not open"):
        drafter.observe([commit_of("other", 2, [1])])
    with pytest.raises(DrafterError, match="without a token"):
        drafter.open(request("empty", [], 0, 0.0))
    drafter.close("r")
    drafter.close("r")
    with pytest.raises(DrafterError, match="not open"):
        drafter.propose([Query("r", 2, 4)])


@every_drafter
def test_no_queries(make: Callable[[], Drafter]) -> None:
    assert make().propose([]) == []
