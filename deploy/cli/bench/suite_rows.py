"""The rows of the suite of SPECTRA by profile, and the drafters that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ....cluster.config import DrafterConfig
from ....measure.clients.setting import Setting

PAPER, DRAFTLINE, BETWEEN = "paper", "draftline", "between"
# As many nodes as the paper's G = 15 guesses of N - 1 = 4 tokens.
TREE_NODES, PAPER_GUESS_LEN = 60, 4
# In draftline's profile what copies text copies up to as many tokens as suffix decoding does by
# default, so that no row is better for longer guesses alone. The window is the paper's.
GUESS_LEN, WINDOW = 16, 15
# Parts of CORE that rows leave out, in the order in which the paper's lose more and more.
PARTS = {"sub-n-grams": "sub_ngrams", "backward": "backward", "forward": "forward"}
# From a paper's drafter to draftline's, one change after the other, by kind. From `BY_VALUE` on,
# trees take nodes by their value, which is the same to one drafter whose nodes have room.
BY_VALUE = "nodes by value"
# The row that takes the store of the lowest perplexity.
REFINED = "REST, refined store"
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "spectra": {
        "CORE of the paper": {},
        "of prefixes the longest": {"keep_prefixes": False},
        "backward guess first": {"forward_first": False},
        "learns the prompt": {"seed_from_prompt": True},
        "learns the answer": {"learn_committed": True},
        BY_VALUE: {},
        "copies up to 16 tokens": {"guess_len": GUESS_LEN},
        "looks for what is new among 8": {"explore_top_k": 8},
        "window of 3": {"window": 3},
    },
    # The paper's is ours; the second is that of the table of our own rows.
    "anpd": {"ANPD of the paper": {}, "ANPD, up to 16 tokens": {"num_tokens": GUESS_LEN}},
    "lookahead": {
        "Lookahead of the paper": {},
        "Lookahead, 7 guesses": {"guess_set_size": 7},
        "Lookahead, window of 7": {"window": 7},
    },
    "retrieval": {
        "REST of the paper": {},
        "REST, weighs shorter matches": {"rule": "smoothed"},
        "REST, up to 16 tokens": {"max_depth": 16},
        "REST, ranked with the noise": {"coupled": True},
        REFINED: {},
    },
}
# Both halves of SPECTRA, as the last of their rows have them.
BOTH = tuple(list(CHANGES[kind])[-1] for kind in ("spectra", "retrieval"))
INTERNAL_FIRST = "SPECTRA, internal guesses first"
# Rows that follow no other one.
FIRST_ROWS = (*(next(iter(rows)) for rows in CHANGES.values()), INTERNAL_FIRST)


@dataclass(frozen=True, slots=True)
class Stores:
    """Retrieval stores of one corpus: folders, URLs or bundled names; None: rows are left out.

    refined    documents of the lowest perplexity
    unrefined  as many documents, whatever their perplexity
    """

    refined: str | None
    unrefined: str | None


# In the order of the paper's tables; of several drafters the first ones have priority.
_CORE_ROWS: dict[str, tuple[str, ...]] = {
    "CORE": ("core",),
    **{f"CORE without {part}": (f"core-no-{part}",) for part in PARTS},
}
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
        **_CORE_ROWS,
        "CORE, exploring above r_th": ("core-gt",),
        # Accepted tokens count for the first half that knew them.
        "CORE's halves, forward first": ("core-no-backward", "core-no-forward"),
        "CORE's halves, backward first": ("core-no-forward", "core-no-backward"),
        **_MIXED_ROWS,
    },
    DRAFTLINE: {
        "ANPD": ("anpd",),
        "Lookahead": ("lookahead",),
        "Lookahead+RETRIEVAL without refinement": ("lookahead", "unrefined"),
        **_CORE_ROWS,
        "CORE, guesses of N-1 tokens": ("core-short",),
        **_MIXED_ROWS,
        "prompt lookup": ("prompt_lookup",),
        "suffix decoding": ("suffix",),
        "token recycling": ("token_recycling",),
        "all": ("suffix", "core", "retrieval", "token_recycling"),
    },
    BETWEEN: {
        **{row: (row,) for rows in CHANGES.values() for row in rows},
        INTERNAL_FIRST: BOTH,
        "SPECTRA, nodes by value": BOTH,
    },
}


def rows_of(profile: str) -> Iterator[Setting]:
    """The rows, whose drafters may have no store."""
    is_ordered = profile != DRAFTLINE
    for row, names in _ROWS[profile].items():
        is_ordered &= row != BY_VALUE
        sources = tuple(f"{profile}-{name}" for name in names)
        in_order = is_ordered or row == INTERNAL_FIRST
        yield Setting(f"{profile}: {row}", sources, is_ordered=in_order)


def drafters_of(profile: str, stores: Stores) -> Iterator[DrafterConfig]:
    """All drafters that rows name, but for those without a store."""
    made = {PAPER: _paper, DRAFTLINE: _own, BETWEEN: _between}[profile](stores)
    for kind, name, options in made:
        yield DrafterConfig(kind=kind, name=f"{profile}-{name}", max_nodes=TREE_NODES, **options)


Made = Iterator[tuple[str, str, dict[str, Any]]]


def _paper(stores: Stores) -> Made:
    profile = {"profile": PAPER}
    yield "anpd", "anpd", profile
    yield "lookahead", "lookahead", profile
    yield "spectra", "core", profile
    yield "spectra", "core-gt", profile | {"explore_when": "gt"}
    for part, option in PARTS.items():
        yield "spectra", f"core-no-{part}", profile | {option: False}
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
    for part, option in PARTS.items():
        yield "spectra", f"core-no-{part}", core | {option: False}
    if stores.refined is not None:
        yield "retrieval", "retrieval", {"store": stores.refined}
    if stores.unrefined is not None:
        yield "retrieval", "unrefined", {"store": stores.unrefined}


def _between(stores: Stores) -> Made:
    for kind, rows in CHANGES.items():
        options: dict[str, Any] = {"profile": PAPER}
        for row, change in rows.items():
            options |= change
            if kind != "retrieval":
                yield kind, row, dict(options)
                continue
            store = stores.refined if row == REFINED else stores.unrefined
            if store is not None:
                yield kind, row, options | {"store": store}
