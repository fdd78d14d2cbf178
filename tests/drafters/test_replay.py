"""Drafters on a text that they have not seen: source code of the standard library, as bytes."""

import inspect
import statistics
from typing import Any

import numpy as np
import pytest
from draftline.core.interfaces import Drafter, Subtree
from draftline.core.proposals import chain_proposal
from draftline.drafters.ngram.anpd import AnpdDrafter
from draftline.drafters.ngram.prompt_lookup import PromptLookupDrafter, PromptLookupOptions
from draftline.drafters.retrieval import RetrievalDrafter
from draftline.drafters.spectra.drafter import SpectraDrafter, SpectraOptions
from draftline.drafters.suffix.drafter import SuffixDrafter, SuffixOptions
from support.fakes.fake_lookup import FakeLookup
from support.inputs.replay import byte_tokens, matching_prefix, replay

CODE = byte_tokens(inspect.getsource(statistics)[:4000])


def spectra(**options: Any) -> SpectraDrafter:
    return SpectraDrafter(options=SpectraOptions(pool=False, **options))


def suffix(**options: Any) -> SuffixDrafter:
    return SuffixDrafter(options=SuffixOptions(**options))


# Measured tau: 2.90, 2.30, 2.85, 2.42, 2.56, 2.76, 2.70, 2.55, 2.54, 2.96.
# Other versions of Python have other sources.
@pytest.mark.parametrize(
    ("drafter", "least"),
    [
        (PromptLookupDrafter(), 2.4),
        (PromptLookupDrafter(options=PromptLookupOptions(num_matches=1)), 1.9),
        (spectra(), 2.4),
        (spectra(forward=False), 2.0),
        (spectra(backward=False), 2.1),
        (spectra(sub_ngrams=False), 2.3),
        (AnpdDrafter(), 2.2),
        (suffix(), 2.1),
        (suffix(tree=False), 2.1),
        (suffix(max_spec_offset=4.0, min_token_prob=0.02), 2.4),
    ],
    ids=[
        "lookup",
        "lookup-chain",
        "spectra",
        "backward",
        "forward",
        "full-ngrams",
        "anpd",
        "suffix",
        "suffix-path",
        "suffix-wide",
    ],
)
def test_repetitive_text_is_guessed(drafter: Drafter, least: float) -> None:
    replayed = replay(drafter, CODE, prompt_len=1000, max_nodes=24)
    assert replayed.committed == 3000
    assert replayed.tau > least, replayed


def test_more_continuations_commit_more() -> None:
    one = PromptLookupDrafter(options=PromptLookupOptions(num_matches=1))
    three = PromptLookupDrafter(options=PromptLookupOptions(num_matches=3))
    assert replay(three, CODE, 1000, 24).tau > replay(one, CODE, 1000, 24).tau


def test_unguessable_text_commits_one_token_a_step() -> None:
    text = np.arange(60, dtype=np.int32)
    assert replay(PromptLookupDrafter(), text, 20, 8).tau == 1.0
    assert replay(spectra(), text, 20, 8).tau == 1.0
    assert replay(AnpdDrafter(), text, 20, 8).tau == 1.0
    assert replay(suffix(), text, 20, 8).tau == 1.0


def test_an_answer_that_came_before_is_guessed() -> None:
    """As when an agent asks the same again: nothing repeats within the text."""
    text = np.arange(60, dtype=np.int32)
    drafter = suffix()
    assert replay(drafter, text, 20, 8).tau == 1.0
    assert replay(drafter, text, 20, 8).tau > 4.0


def test_replay_counts_as_the_walk_does() -> None:
    """A drafter that always says 1 1, on the text 0 | 1 1 1 1 2 1: steps 1 1 1, 1 2, 1."""
    ones = Subtree(
        np.array([1, 1], dtype=np.int32),
        np.array([-1, 0], dtype=np.int32),
        np.zeros(2, dtype=np.float32),
        match_len=9,
    )
    text = np.array([0, 1, 1, 1, 1, 2, 1], dtype=np.int32)
    replayed = replay(RetrievalDrafter(FakeLookup(ones)), text, 1, 8)
    assert (replayed.steps, replayed.committed, replayed.nodes) == (3, 6, 6)


def test_matching_prefix_follows_one_path() -> None:
    proposal = chain_proposal("x", np.array([4, 5, 6], dtype=np.int32))
    for text, expected in (([4, 5, 6, 7], 3), ([4, 5, 7], 2), ([5], 0), ([4], 1)):
        assert matching_prefix(proposal, np.array(text, dtype=np.int32)) == expected
