"""The rows of the suite of SPECTRA by profile, and the drafters that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ....cluster.config import DrafterConfig
from ....measure.clients.setting import Setting

PAPER, DRAFTLINE = "paper", "draftline"
# As many nodes as the paper's G = 15 guesses of N - 1 = 4 tokens.
TREE_NODES, PAPER_GUESS_LEN = 60, 4
# In draftline's profile what copies text copies up to as many tokens as suffix decoding does by
# default, so that no row is better for longer guesses alone. The window is the paper's.
GUESS_LEN, WINDOW = 16, 15


@dataclass(frozen=True, slots=True)
class Stores:
    """Retrieval stores of one corpus: folders, URLs or bundled names; None: rows are left out.

    refined    documents of the lowest perplexity
    unrefined  as many documents, whatever their perplexity
    """

    refined: str | None
    unrefined: str | None


# In the order of the paper's tables; of several drafters the first ones have priority.
_MIXED_ROWS: dict[str, tuple[str, ...]] = {
    "RETRIEVAL": ("retrieval",),
    "RETRIEVAL without refinement": ("unrefined",),
    "SPECTRA": ("core", "retrieval"),
    "SPECTRA without refinement": ("core", "unrefined"),
}
_ROWS: Mapping[str, dict[str, tuple[str, ...]]] = {
    PAPER: {
        "ANPD": ("anpd",),
        "REST": ("rest",),
        "Lookahead": ("lookahead",),
        "naive Lookahead+REST": ("lookahead", "rest"),
        "CORE": ("core",),
        **_MIXED_ROWS,
    },
    DRAFTLINE: {
        "ANPD": ("anpd",),
        "Lookahead": ("lookahead",),
        "Lookahead+RETRIEVAL without refinement": ("lookahead", "unrefined"),
        "CORE": ("core",),
        "CORE, guesses of N-1 tokens": ("core-short",),
        **_MIXED_ROWS,
        "prompt lookup": ("prompt_lookup",),
        "suffix decoding": ("suffix",),
        "token recycling": ("token_recycling",),
        "all": ("suffix", "core", "retrieval", "token_recycling"),
    },
}


def rows_of(profile: str) -> Iterator[Setting]:
    """The rows, whose drafters may have no store."""
    for row, names in _ROWS[profile].items():
        sources = tuple(f"{profile}-{name}" for name in names)
        yield Setting(f"{profile}: {row}", sources, is_ordered=profile == PAPER)


def drafters_of(profile: str, stores: Stores) -> Iterator[DrafterConfig]:
    """All drafters that rows name, but for those without a store."""
    made = {PAPER: _paper, DRAFTLINE: _own}[profile](stores)
    for kind, name, options in made:
        yield DrafterConfig(kind=kind, name=f"{profile}-{name}", max_nodes=TREE_NODES, **options)


Made = Iterator[tuple[str, str, dict[str, Any]]]


def _paper(stores: Stores) -> Made:
    profile = {"profile": PAPER}
    yield "anpd", "anpd", profile
    yield "lookahead", "lookahead", profile
    yield "spectra", "core", profile
    if stores.refined is not None:
        options = {"store": stores.refined, "max_depth": PAPER_GUESS_LEN}
        yield "retrieval", "retrieval", profile | options
    if stores.unrefined is not None:
        yield "retrieval", "rest", profile | {"store": stores.unrefined}
        options = {"store": stores.unrefined, "max_depth": PAPER_GUESS_LEN}
        yield "retrieval", "unrefined", profile | options


def _own(stores: Stores) -> Made:
    yield "anpd", "anpd", {"num_tokens": GUESS_LEN}
    yield "lookahead", "lookahead", {"window": WINDOW, "guess_set_size": WINDOW}
    yield "prompt_lookup", "prompt_lookup", {"num_tokens": GUESS_LEN}
    yield "suffix", "suffix", {"num_tokens": GUESS_LEN}
    yield "token_recycling", "token_recycling", {}
    core = {"window": WINDOW, "guess_len": GUESS_LEN}
    yield "spectra", "core", core
    yield "spectra", "core-short", {"window": WINDOW, "guess_len": 0}
    if stores.refined is not None:
        yield "retrieval", "retrieval", {"store": stores.refined}
    if stores.unrefined is not None:
        yield "retrieval", "unrefined", {"store": stores.unrefined}
