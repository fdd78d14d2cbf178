"""Every kind of drafter, small enough that texts of a few tokens teach it something."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from draftline.core.arrays import Int32
from draftline.core.interfaces import Drafter
from draftline.core.proposals import Commit, DraftRequest, Proposal, TopNextTokens
from draftline.drafters.model.drafter import ModelDrafter
from draftline.drafters.model.options import ModelOptions
from draftline.drafters.ngram.anpd import AnpdDrafter, AnpdOptions
from draftline.drafters.ngram.lookahead import LookaheadDrafter, LookaheadOptions
from draftline.drafters.ngram.prompt_lookup import PromptLookupDrafter, PromptLookupOptions
from draftline.drafters.ngram.token_recycling import TokenRecyclingDrafter, TokenRecyclingOptions
from draftline.drafters.retrieval import RetrievalDrafter
from draftline.drafters.spectra.drafter import SpectraDrafter, SpectraOptions
from draftline.drafters.suffix.drafter import SuffixDrafter, SuffixOptions
from draftline.models.load.model_info import ModelInfo
from support.fakes.fake_lookup import CountingLookup
from support.fakes.fake_model_stage import FakeModelStage

VOCAB = 6
INFO = ModelInfo(Path(), "fake", VOCAB, 8, 1, 1, 8, 4096, (), None)


def model_drafter() -> Drafter:
    stage: Any = FakeModelStage(VOCAB, block_size=4)
    return ModelDrafter(stage, INFO, options=ModelOptions(block_size=4, prefill_chunk=5))


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
}


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
