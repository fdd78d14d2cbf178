"""Builds the drafter that a `DrafterConfig` describes, and compiles its loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import ConfigError
from ...core.interfaces import Drafter
from ...core.proposals import Commit, DraftRequest, Query
from ...drafters.ngram.anpd import AnpdDrafter, AnpdOptions
from ...drafters.ngram.lookahead import PAPER as LOOKAHEAD_PAPER
from ...drafters.ngram.lookahead import LookaheadDrafter, LookaheadOptions
from ...drafters.ngram.prompt_lookup import PromptLookupDrafter, PromptLookupOptions
from ...drafters.ngram.token_recycling import TokenRecyclingDrafter, TokenRecyclingOptions
from ...drafters.retrieval import PAPER as REST_PAPER
from ...drafters.retrieval import REST, RetrievalDrafter, RetrievalOptions
from ...drafters.spectra.drafter import PAPER as SPECTRA_PAPER
from ...drafters.spectra.drafter import SpectraDrafter, SpectraOptions
from ...drafters.suffix.drafter import SuffixDrafter, SuffixOptions
from ...retrieval_store.search.lookup import REST_RULE, LookupRule
from ..config import HEAD, DrafterConfig, EngineConfig
from .options import HEAD_KEYS, HEAD_PAPER, drafter_options, head_folder

if TYPE_CHECKING:
    from ...drafters.heads.options import HeadOptions
    from ...drafters.model.options import ModelOptions
    from ...models.load.model_info import ModelInfo

WARM_UP_ID = "warm-up"


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What a drafter is built from. `values` holds the kind's own keys, None where not given."""

    name: str
    transport: str
    options: Any
    values: Mapping[str, Any]
    engine: EngineConfig | None
    config: DrafterConfig

    def require(self, key: str, meaning: str) -> str:
        value = self.values[key]
        if not isinstance(value, str) or not value:
            raise ConfigError(key, f"must be given: {meaning}")
        return value


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is known of a kind.

    own_keys  keys of the settings that are not fields of the class that `options` gives
    paper     options as its authors have them, where they differ; None: there is no such profile
    """

    options: Callable[[], type]
    build: Callable[[_Recipe], Drafter]
    own_keys: tuple[str, ...] = ()
    paper: Mapping[str, Any] | None = None


def build_drafter(config: DrafterConfig, engine: EngineConfig | None = None) -> Drafter:
    """The drafter of `config`, its model or store loaded.

    engine: settings of the engine it drafts for; without it, a model or store of another
    tokenizer is not noticed here.
    Raises `ConfigError` naming the key; `CheckpointError` or `StoreError` for what it loads.
    """
    kind = KINDS.get(config.kind)
    if kind is None:
        raise ConfigError("kind", f"unknown drafter {config.kind!r}; known: {', '.join(KINDS)}")
    options = drafter_options(config, kind.options(), kind.own_keys, kind.paper)
    values = {key: config.options.get(key) for key in kind.own_keys}
    return kind.build(_Recipe(config.source, config.transport, options, values, engine, config))


def keeps_answers(config: DrafterConfig) -> bool:
    """Whether a drafter learns from requests that have ended."""
    if config.kind == "suffix":
        return config.options.get("answer_tokens") != 0
    return config.kind == "retrieval" and bool(config.options.get("learn", False))


def _plain(
    options: type,
    drafter: Callable[[str, Any], Drafter],
    paper: Mapping[str, Any] | None = None,
) -> _Kind:
    """A kind that needs nothing but its options."""

    def build(recipe: _Recipe) -> Drafter:
        warm_up(drafter(recipe.name, recipe.options))
        return drafter(recipe.name, recipe.options)

    return _Kind(lambda: options, build, paper=paper)


# torch and transformers take seconds to import, and the servers of the other drafters need
# neither; so what needs them is imported where it is used.


def _model_options() -> type:
    from ...drafters.model.options import ModelOptions  # noqa: PLC0415

    return ModelOptions


def _target(engine: EngineConfig) -> ModelInfo:
    from ...models.load.model_info import read_model_info  # noqa: PLC0415

    return read_model_info(engine.model)


def _model(recipe: _Recipe) -> Drafter:
    from ...drafters.model.drafter import load_model_drafter  # noqa: PLC0415

    model = recipe.require("model", "a folder or hub id, or demo-drafter")
    target = None if recipe.engine is None else _target(recipe.engine)
    options: ModelOptions = recipe.options
    if options.device == "auto" and not _may_use_gpu(recipe):
        options = replace(options, device="cpu")
    return load_model_drafter(model, recipe.name, options, target)


def _may_use_gpu(recipe: _Recipe) -> bool:
    """Whether a GPU is there for it: on Ray only an actor of its own reserves one."""
    engine = recipe.engine
    if engine is None or engine.backend == "local":
        return engine is None or engine.device != "cpu"
    return recipe.transport == "grpc" and engine.gpus_per_drafter > 0


def _head_options() -> type:
    from ...drafters.heads.options import HeadOptions  # noqa: PLC0415

    return HeadOptions


def _head(recipe: _Recipe) -> Drafter:
    from ...drafters.heads.drafter import load_head_drafter  # noqa: PLC0415

    folder = head_folder(recipe.config)
    if recipe.engine is None:
        raise ConfigError(
            "kind", "head needs the served model, whose states it reads: start the server with "
            "--target MODEL",
        )  # fmt: skip
    options: HeadOptions = recipe.options
    if options.device == "auto" and not _may_use_gpu(recipe):
        options = replace(options, device="cpu")
    return load_head_drafter(folder, _target(recipe.engine), recipe.name, options)


def _retrieval(recipe: _Recipe) -> Drafter:
    from ..retrieval import open_source  # noqa: PLC0415

    model = None if recipe.engine is None else recipe.engine.model
    options: RetrievalOptions = recipe.options
    learns_for = model if options.learn else None
    if options.learn and model is None:
        raise ConfigError("learn", "needs the served model: start the server with --target MODEL")
    url = recipe.require("store", "a folder or a redis:// URL")
    learn_off = _names(recipe.values["learn_off"])
    source = open_source(url, model, learns_for, learn_off, _lookup_rule(options))
    return RetrievalDrafter(source.lookup, recipe.name, options, source.learner, source.free)


def _lookup_rule(options: RetrievalOptions) -> LookupRule:
    rule = REST_RULE if options.rule == REST else LookupRule()
    return replace(rule, max_depth=options.max_depth)


def _names(value: object) -> list[str]:
    given = [] if value is None else value
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        return given
    raise ConfigError("learn_off", "must be a list of namespaces")


KINDS: Mapping[str, _Kind] = {
    "prompt_lookup": _plain(PromptLookupOptions, PromptLookupDrafter),
    "spectra": _plain(SpectraOptions, SpectraDrafter, SPECTRA_PAPER),
    "lookahead": _plain(LookaheadOptions, LookaheadDrafter, LOOKAHEAD_PAPER),
    # Its defaults are the best of its paper's.
    "anpd": _plain(AnpdOptions, AnpdDrafter, {}),
    "suffix": _plain(SuffixOptions, SuffixDrafter),
    "token_recycling": _plain(TokenRecyclingOptions, TokenRecyclingDrafter),
    "model": _Kind(_model_options, _model, ("model",)),
    HEAD: _Kind(_head_options, _head, HEAD_KEYS, HEAD_PAPER),
    "retrieval": _Kind(lambda: RetrievalOptions, _retrieval, ("store", "learn_off"), REST_PAPER),
}


def warm_up(drafter: Drafter) -> None:
    """Take a drafter through the life of a short request. Discard the drafter afterwards."""
    text = np.array([1, 2, 3, 1, 2, 3, 1, 2], dtype=np.int32)
    drafter.open(DraftRequest(WARM_UP_ID, text, len(text), temperature=0.0, seed=0))
    length = len(text)
    for token in (3, 1):
        drafter.propose([Query(WARM_UP_ID, length, 4)])
        drafter.observe([Commit(WARM_UP_ID, length, np.array([token], dtype=np.int32))])
        length += 1
    drafter.propose([Query(WARM_UP_ID, length, 4)])
    drafter.close(WARM_UP_ID)
    # What ended requests said is looked at, too.
    drafter.open(DraftRequest("again", text, len(text), temperature=0.0, seed=0))
    drafter.propose([Query("again", len(text), 4)])
