"""`draftline bench --suite spectra`: the rows of SPECTRA's Tables 1 and 2, and their recent peers.

Le et al., ACL 2025 (2025.acl-long.685). Every row is a set of drafters of this engine, so that they
differ in what they draft and in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ....cluster.config import DrafterConfig
from ....core.errors import ConfigError
from ....measure.clients.setting import TARGET_ONLY, Setting
from .job import BenchJob

# As many nodes as the paper's G = 15 guesses of N - 1 = 4 tokens, and every one of them verified:
# what a row drafts then depends on no clock.
ENGINE_SETTINGS: dict[str, Any] = {"tree_nodes": 60, "node_budget": "full"}
MAX_NODES = 60
# What copies text copies up to as many tokens as suffix decoding does by default, so that no row
# is better for longer guesses alone.
GUESS_LEN = 16
# The paper's W; Lookahead's window likewise.
WINDOW = 15


@dataclass(frozen=True, slots=True)
class Stores:
    """Retrieval stores of one corpus: folders, URLs or bundled names; None: rows are left out.

    refined    documents of the lowest perplexity
    unrefined  as many documents, whatever their perplexity
    """

    refined: str | None
    unrefined: str | None


@dataclass(frozen=True, slots=True)
class Suite:
    """Every drafter that a setting names, and the settings; the target alone comes first.

    left_out  rows that have no store
    """

    drafters: tuple[DrafterConfig, ...]
    settings: tuple[Setting, ...]
    left_out: tuple[str, ...]


def with_suite(
    job: BenchJob, settings: Mapping[str, Any], tell: Callable[[str], None]
) -> tuple[BenchJob, dict[str, Any]]:
    """A job and engine settings with the suite's in place of their own.

    The bundled model's refined store need not be named. Raises `ConfigError`.
    """
    if job.base_url is not None or job.drafters is not None:
        raise ConfigError(
            "suite", "brings its own drafters and engines: leave out --base-url and --drafters"
        )
    stores = Stores(job.store, job.unrefined_store)
    if stores.refined is None and settings.get("model") == "demo":
        stores = replace(stores, refined="demo")
    suite = spectra_suite(stores)
    if suite.left_out:
        tell(f"left out, for want of a store: {', '.join(suite.left_out)}")
    suite_settings = ENGINE_SETTINGS | dict(settings) | {"drafters": suite.drafters}
    return replace(job, rows=suite.settings), suite_settings


def spectra_suite(stores: Stores) -> Suite:
    """The rows whose stores are given."""
    drafters = {drafter.source: drafter for drafter in _drafters(stores)}
    rows = {row: drafters.keys() >= set(sources) for row, sources in _ROWS.items()}
    settings = [Setting(row, _ROWS[row]) for row, has_all in rows.items() if has_all]
    return Suite(
        tuple(drafters.values()),
        (Setting(TARGET_ONLY, ()), *settings),
        tuple(row for row, has_all in rows.items() if not has_all),
    )


# In the order of the paper's tables; of several drafters the first ones have priority.
_ROWS: dict[str, tuple[str, ...]] = {
    "ANPD": ("anpd",),
    "Lookahead": ("lookahead",),
    "REST, or RETRIEVAL without refinement": ("unrefined",),
    "naive Lookahead+REST": ("lookahead", "unrefined"),
    "CORE": ("core",),
    "CORE, guesses of N-1 tokens": ("core-paper",),
    "CORE without forward": ("core-no-forward",),
    "CORE without backward": ("core-no-backward",),
    "CORE without sub-n-grams": ("core-no-sub-ngrams",),
    "RETRIEVAL": ("retrieval",),
    "SPECTRA": ("core", "retrieval"),
    "SPECTRA without refinement": ("core", "unrefined"),
    "prompt lookup": ("prompt_lookup",),
    "suffix decoding": ("suffix",),
    "token recycling": ("token_recycling",),
    "draftline": ("suffix", "core", "retrieval", "token_recycling"),
}


def _drafters(stores: Stores) -> Iterator[DrafterConfig]:
    yield _drafter("anpd", num_tokens=GUESS_LEN)
    yield _drafter("lookahead", window=WINDOW, guess_set_size=WINDOW)
    yield _drafter("prompt_lookup", num_tokens=GUESS_LEN)
    yield _drafter("suffix", num_tokens=GUESS_LEN)
    yield _drafter("token_recycling")
    core = {"window": WINDOW, "guess_len": GUESS_LEN}
    yield _drafter("spectra", "core", **core)
    yield _drafter("spectra", "core-paper", window=WINDOW, guess_len=0)
    for part in ("forward", "backward", "sub_ngrams"):
        options = core | {part: False}
        yield _drafter("spectra", f"core-no-{part.replace('_', '-')}", **options)
    if stores.refined is not None:
        yield _drafter("retrieval", store=stores.refined)
    if stores.unrefined is not None:
        yield _drafter("retrieval", "unrefined", store=stores.unrefined)


def _drafter(kind: str, name: str = "", **options: Any) -> DrafterConfig:
    return DrafterConfig(kind=kind, name=name, max_nodes=MAX_NODES, **options)
