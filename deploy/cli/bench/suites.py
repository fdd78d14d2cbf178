"""The suites of `draftline bench`: their drafters, and the rows of their tables.

`spectra`: SPECTRA's tables and recent peers. `heads`: trained heads beside what needs no training,
with dynamic trees as EAGLE-2 has them (arXiv 2406.16858). `model-drafters`: small models of several
tokenizers; where a cost profile gives drafts a price, they stop by what a level brings and takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import filter as filter_names
from typing import Any

from ....cluster.config import DrafterConfig, EngineConfig
from ....core.errors import ConfigError
from ....measure.clients.endpoint import TARGET_ONLY, Setting
from ....models.load.bundled import BUNDLED_HEADS, BUNDLED_TARGETS
from .job import BenchJob

PAPER, DRAFTLINE = "paper", "draftline"
# As many nodes as the paper's G = 15 guesses of N - 1 = 4 tokens.
TREE_NODES, PAPER_GUESS_LEN = 60, 4
# In draftline's profile all copying drafters copy as many tokens as suffix decoding by default, so
# that no row is better for longer guesses alone. The window is the paper's.
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
    """All drafters of the rows, without those that lack a store."""
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


DEPTH, TOP_K = 6, 10
CHAIN, TREE = "chain", "tree"
SMALL_MODEL, UNTRAINED, MERGED = "small model", "training-free", "everything merged"


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The drafters and the settings of the suite, by what there is for the target.

    heads        folders of trained heads, by the names of their rows, in the order of the table
    merged       names of the heads in the row of everything
    small_model  folder or name of a small model of the target's tokenizer
    store        retrieval store
    """

    heads: Mapping[str, str]
    merged: Collection[str]
    small_model: str | None = None
    store: str | None = None

    def drafters(self) -> Iterator[DrafterConfig]:
        """All drafters of the settings."""
        for name, folder in self.heads.items():
            own = {"model": folder, "num_tokens": DEPTH}
            yield _drafter("head", f"{name}-{CHAIN}", tree="chain", **own)
            yield _drafter("head", f"{name}-{TREE}", top_k=TOP_K, **own)
        if self.small_model is not None:
            yield _drafter(
                "model", "model", model=self.small_model, tree="dynamic", top_k=TOP_K,
                num_tokens=DEPTH,
            )  # fmt: skip
        yield _drafter("suffix", "suffix", num_tokens=16)
        yield _drafter("spectra", "spectra", guess_len=16)
        yield _drafter("token_recycling", "token_recycling")
        if self.store is not None:
            yield _drafter("retrieval", "retrieval", store=self.store)

    def settings(self) -> Iterator[Setting]:
        """Chains, then trees, of every head; then the others, and all together."""
        for form in (CHAIN, TREE):
            for name in self.heads:
                yield Setting(f"{name} {form}", (f"{name}-{form}",), draft_length=DEPTH)
        trees = [f"{name}-{TREE}" for name in self.heads if name in self.merged]
        small = [] if self.small_model is None else ["model"]
        if small:
            yield Setting(SMALL_MODEL, tuple(small), draft_length=DEPTH)
        untrained = ["suffix", "spectra", "token_recycling"]
        untrained += [] if self.store is None else ["retrieval"]
        yield Setting(UNTRAINED, tuple(untrained))
        yield Setting(MERGED, (*trees, *small, *untrained))


def bundled_heads() -> dict[str, str]:
    """The heads of `demo`, by the names of their rows."""
    return {name.removeprefix("demo-"): name for name in BUNDLED_HEADS}


def read_heads(text: str) -> dict[str, str]:
    """Folders by name, of `NAME=FOLDER` parted by commas. Raises `ConfigError`."""
    heads: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, mark, folder = part.partition("=")
        if not (name and mark and folder) or name in heads:
            raise ConfigError("heads", f"must be NAME=FOLDER, each name once, not {part!r}")
        heads[name] = folder
    return heads


def _drafter(kind: str, name: str, **options: object) -> DrafterConfig:
    return DrafterConfig(kind=kind, name=name, max_nodes=TREE_NODES, **options)


MODEL_NODES, MODEL_DEPTH, MODEL_TOP_K = 32, 6, 6
GOODPUT = "goodput"
# Rows that a rule other than `coupled` decides about: the rule, and which of `_RULED` drafts.
RULES: Mapping[str, tuple[str, str]] = {
    "chain, rejection": ("rejection", "drawn-chain"),
    "tree of draws, rejection": ("rejection", "drawn-tree"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRows:
    """The drafters and the settings of the suite, by what there is for the target.

    same        small model of the target's tokenizer; None: there is none
    other       one of another tokenizer
    alphabet    one of single bytes or letters
    is_sampled  whether there is a temperature, without which all rules are alike
    is_timed    whether a cost profile says how long drafts take
    """

    same: str | None
    other: str
    alphabet: str
    is_sampled: bool
    is_timed: bool

    def drafters(self) -> Iterator[DrafterConfig]:
        """All drafters of the settings, without those of a small model that there is not."""
        for vocabulary in ("tli", "slem"):
            yield self._model(f"{vocabulary}-chain", self.other, vocabulary=vocabulary)
            yield self._model(f"{vocabulary}-tree", self.other, vocabulary=vocabulary, **_DYNAMIC)
        yield self._model("slrs", self.alphabet, vocabulary="slrs")
        if self.same is None:
            return
        yield self._model("same-chain", self.same)
        yield self._model("same-tree", self.same, **_DYNAMIC)
        yield self._model("full-tree", self.same, **_STATIC)
        if self.is_sampled:
            yield self._model("drawn-chain", self.same)
            yield self._model("drawn-tree", self.same, **_STATIC)

    def settings(self) -> Iterator[Setting]:
        """Each way alone, then drafters together, then rules beside `coupled`."""
        yield Setting("same chain", ("same-chain",))
        yield Setting("same tree", ("same-tree",))
        for vocabulary in ("tli", "slem"):
            for form in ("chain", "tree"):
                yield Setting(f"{vocabulary.upper()} {form}", (f"{vocabulary}-{form}",))
        yield Setting("SLRS", ("slrs",))
        yield Setting("same tree + TLI tree", ("same-tree", "tli-tree"))
        yield Setting("same tree + SLEM tree", ("same-tree", "slem-tree"))
        yield Setting("TLI tree + SLEM tree", ("tli-tree", "slem-tree"))
        yield Setting("static tree, coupled", ("full-tree",))
        if self.is_sampled:
            for name, (rule, drafter) in RULES.items():
                yield Setting(name, (drafter,), acceptance=rule)

    @property
    def _own(self) -> Mapping[str, Any]:
        """Options of every model."""
        return {"stop": GOODPUT} if self.is_timed else {}

    def _model(self, name: str, model: str, **options: Any) -> DrafterConfig:
        given = {"max_nodes": MODEL_NODES, "num_tokens": MODEL_DEPTH, **self._own, **options}
        return DrafterConfig(kind="model", name=name, model=model, **given)


# EAGLE-2's tree, and the static one of the highest expected acceptance, as large as is allowed:
# nodes of the same ranks, whatever was drawn.
_DYNAMIC: Mapping[str, Any] = {"tree": "dynamic", "top_k": MODEL_TOP_K}
_STATIC: Mapping[str, Any] = {"tree": "sequoia", "tree_size": "full"}


# Every draft token is verified, so that drafts do not depend on a clock.
ENGINE_SETTINGS: dict[str, Any] = {"tree_nodes": TREE_NODES, "node_budget": "full"}


MODEL_DRAFTERS = "model-drafters"


@dataclass(frozen=True, slots=True)
class Suite:
    """The drafters and settings of a suite; the target alone comes first.

    left_out  rows that have no store or no small model
    """

    drafters: tuple[DrafterConfig, ...]
    settings: tuple[Setting, ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, drafters: Iterable[DrafterConfig], rows: Iterable[Setting]) -> Suite:
        """The rows whose drafters there are."""
        known = {drafter.source: drafter for drafter in drafters}
        settings, left_out = [Setting(TARGET_ONLY, ())], []
        for row in rows:
            if known.keys() >= set(row.drafters or ()):
                settings.append(row)
            else:
                left_out.append(row.name)
        return cls(tuple(known.values()), tuple(settings), tuple(left_out))


def with_suite(
    job: BenchJob, settings: Mapping[str, Any], tell: Callable[[str], None]
) -> tuple[BenchJob, dict[str, Any]]:
    """A job and engine settings with the suite's in place of their own.

    What is bundled for a target need not be named: a refined store, heads, a small model. Raises
    `ConfigError`.
    """
    if job.base_url is not None or job.drafters is not None:
        raise ConfigError(
            "suite", "brings its own drafters and engines: leave out --base-url and --drafters"
        )
    model = settings.get("model", EngineConfig.model_fields["model"].default)
    is_bundled = model in BUNDLED_TARGETS
    store = job.store or ("demo" if is_bundled else None)
    engine_settings = ENGINE_SETTINGS
    if job.suite == "heads":
        suite = heads_suite(job, store, model)
    elif job.suite == MODEL_DRAFTERS:
        suite = models_suite(job, is_bundled=is_bundled)
        engine_settings = ENGINE_SETTINGS | {"tree_nodes": MODEL_NODES}
    else:
        suite = spectra_suite(Stores(store, job.unrefined_store), job.profiles)
    if job.one_engine and any(setting.is_ordered for setting in suite.settings):
        raise ConfigError("one-engine", "profiles other than draftline need engines of their own")
    if suite.left_out:
        tell(f"left out, without a store or small model: {', '.join(suite.left_out)}")
    if job.suite_rows is not None:
        suite = replace(suite, settings=_chosen(suite.settings, job.suite_rows))
    suite_settings = engine_settings | dict(settings) | {"drafters": suite.drafters}
    return replace(job, rows=suite.settings), suite_settings


def _chosen(settings: Sequence[Setting], names: str) -> tuple[Setting, ...]:
    """The target alone and the settings of these names. Raises `ConfigError` for others."""
    wanted = [name.strip() for name in names.split(";")]
    known = [setting.name for setting in settings]
    for name in wanted:
        if not filter_names(known, name):
            raise ConfigError("suite-rows", f"no row {name!r}; there are: {'; '.join(known)}")
    chosen = {TARGET_ONLY, *(name for each in wanted for name in filter_names(known, each))}
    return tuple(one for one in settings if one.name in chosen)


def heads_suite(job: BenchJob, store: str | None, model: str) -> Suite:
    """The rows of the job's heads, before those that are bundled for the model.

    Raises `ConfigError` or `CheckpointError`.
    """
    given = read_heads(job.heads or "")
    bundled = bundled_heads() if model == "demo" else {}
    known = given | {name: head for name, head in bundled.items() if name not in given}
    if not known:
        raise ConfigError("heads", "must name at least one trained head of the model: NAME=FOLDER")
    small_model = "demo-drafter" if model in BUNDLED_TARGETS else None
    rows = HeadRows(known, bundled or known, small_model, store)
    return Suite.of(rows.drafters(), rows.settings())


def models_suite(job: BenchJob, *, is_bundled: bool) -> Suite:
    """The rows of the bundled small models, which have the bundled target's tokenizer or others."""
    rows = ModelRows(
        same="demo-drafter" if is_bundled else None,
        other="demo-drafter-other-vocab",
        alphabet="demo-drafter-bytes",
        is_sampled=job.temperature > 0,
        is_timed=job.cost_profile is not None,
    )
    return Suite.of(rows.drafters(), rows.settings())


def spectra_suite(stores: Stores, profiles: tuple[str, ...]) -> Suite:
    """The rows of these profiles whose stores are given."""
    return Suite.of(
        (drafter for profile in profiles for drafter in drafters_of(profile, stores)),
        (row for profile in profiles for row in rows_of(profile)),
    )
