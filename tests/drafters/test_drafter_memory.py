"""What drafters say of their memory, against what Python counts."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from draftline.core.interfaces import Drafter
from draftline.core.proposals import Commit, DraftRequest, TopNextTokens
from draftline.drafters.ngram.anpd import AnpdDrafter
from draftline.drafters.ngram.lookahead import LookaheadDrafter, LookaheadOptions
from draftline.drafters.ngram.prompt_lookup import PromptLookupDrafter, PromptLookupOptions
from draftline.drafters.ngram.token_recycling import TokenRecyclingDrafter
from draftline.drafters.spectra.drafter import SpectraDrafter, SpectraOptions
from draftline.drafters.suffix.drafter import SuffixDrafter, SuffixOptions

TEXT = (np.random.default_rng(0).zipf(1.3, 20_000) % 2000).astype(np.int32)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "prompt_lookup": PromptLookupDrafter,
    "spectra": partial(SpectraDrafter, options=SpectraOptions(pool=False)),
    "lookahead": partial(LookaheadDrafter, options=LookaheadOptions(pool_from_prompt=True)),
    "anpd": AnpdDrafter,
    "suffix": partial(SuffixDrafter, options=SuffixOptions(answer_tokens=0)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_is_told_is_about_what_is_taken(name: str) -> None:
    drafter = DRAFTERS[name]()
    drafter.open(DraftRequest("first", TEXT[:4000], 4000, 0.0, 1))
    drafter.close("first")
    assert drafter.memory_bytes == 0
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        drafter.open(DraftRequest("r", TEXT[:4000], 4000, 0.0, 1))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 < drafter.memory_bytes / (after - before) < 2.0
    drafter.close("r")
    assert drafter.memory_bytes == 0


@pytest.mark.parametrize(
    "drafter",
    [
        PromptLookupDrafter(options=PromptLookupOptions(window=1000)),
        SpectraDrafter(options=SpectraOptions(pool=False, max_keys=500)),
        LookaheadDrafter(options=LookaheadOptions(pool_from_prompt=True, max_keys=500)),
    ],
    ids=["prompt_lookup", "spectra", "lookahead"],
)
def test_memory_is_bounded(drafter: Drafter) -> None:
    """Beyond a limit a text four times as long takes little more, if anything."""
    drafter.open(DraftRequest("short", TEXT[:5000], 5000, 0.0, 1))
    short = drafter.memory_bytes
    drafter.close("short")
    drafter.open(DraftRequest("long", TEXT, len(TEXT), 0.0, 1))
    # A prompt lookup keeps 4 bytes for each token and length of n-grams.
    assert drafter.memory_bytes < 1.2 * short + 4 * 6 * len(TEXT)


def test_a_shared_table_outlives_its_request() -> None:
    drafter = TokenRecyclingDrafter()
    assert drafter.memory_bytes == 0
    drafter.open(DraftRequest("r", TEXT[:2], 2, 0.0, 1))
    tokens = TEXT[1:2]
    ids = np.arange(8, dtype=np.int32)[None]
    drafter.observe([Commit("r", 2, tokens, top_next_tokens=TopNextTokens(tokens, ids))])
    told = drafter.memory_bytes
    drafter.close("r")
    assert drafter.memory_bytes == told > 0
