"""Options of SPECTRA-CORE, and those of its paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...core.proposals import MAX_PROBE_ROWS
from ..ngram.candidate_pool import require_probe_fits
from ..option_checks import require_fraction, require_switches, require_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class SpectraOptions:
    """Options of `SpectraDrafter`; raises `ConfigError` naming the option.

    Where the paper has another value, `PAPER` has it.

    ngram             N: longest n-gram; forward guesses have up to N-1 tokens
    window            W: columns of the pool; a probe has (N-1) W - 1 rows in the steady state
    max_guesses       G: most guesses of one step
    forward_first     the backward guess comes last, as in the paper's listing; off: first
    guess_len         most tokens of the backward guess; 0 is N-1, as in the paper
    capacity          continuations kept for each token
    max_keys          most keys of each dictionary, of one request
    refine_threshold  r_th: a prediction of the pool explores if a random number is below it, as in
                      the paper's text; its listing explores above it
    explore_top_k     when exploring: the best of so many predictions that begins no n-gram yet; the
                      paper's are the whole vocabulary
    seed_from_prompt  learn the prompt's n-grams
    learn_committed   learn the generated text's n-grams
    sub_ngrams        learn also the n-grams' prefixes, of 2 to N-1 tokens
    keep_prefixes     a continuation and its prefixes are guesses of their own; off: the longest one
    all_offsets       learn the pool's n-grams from every start, not only from the first token
    forward, backward, pool   use that part at all
    """

    # These are fixed: users have no better values.
    FIXED: ClassVar[tuple[str, ...]] = (
        "max_guesses",
        "forward_first",
        "capacity",
        "max_keys",
        "refine_threshold",
        "explore_top_k",
        "seed_from_prompt",
        "learn_committed",
        "sub_ngrams",
        "keep_prefixes",
        "all_offsets",
        "forward",
        "backward",
    )
    ngram: int = 5
    window: int = 3
    max_guesses: int = 15
    forward_first: bool = False
    guess_len: int = 16
    capacity: int = 15
    max_keys: int = 65536
    refine_threshold: float = 0.1
    explore_top_k: int = 8
    seed_from_prompt: bool = True
    learn_committed: bool = True
    sub_ngrams: bool = True
    keep_prefixes: bool = False
    all_offsets: bool = False
    forward: bool = True
    backward: bool = True
    pool: bool = True

    def __post_init__(self) -> None:
        require_whole("ngram", self.ngram, 3, 64)
        require_whole("guess_len", self.guess_len, 0, 1024)
        for field in ("window", "max_guesses", "capacity", "max_keys"):
            require_whole(field, getattr(self, field), 1)
        require_whole("explore_top_k", self.explore_top_k, 1, MAX_PROBE_ROWS)
        require_fraction("refine_threshold", self.refine_threshold)
        require_switches(self, "seed_from_prompt", "learn_committed", "sub_ngrams", "all_offsets")
        require_switches(self, "keep_prefixes", "forward_first", "forward", "backward", "pool")
        if self.pool:
            require_probe_fits(self.ngram, self.window)


# As in the paper's listing, where only the pool feeds the dictionaries.
PAPER = {
    "window": 15,
    "guess_len": 0,
    "forward_first": True,
    "explore_top_k": MAX_PROBE_ROWS,
    "seed_from_prompt": False,
    "learn_committed": False,
    "keep_prefixes": True,
}
