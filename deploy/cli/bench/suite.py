"""`draftline bench --suite`: every row is a set of drafters of this engine, so that rows differ in
what they draft and in nothing else.

spectra  the rows of SPECTRA's Tables 1 and 2, and their recent peers (Le et al., ACL 2025,
         2025.acl-long.685). The paper's rows come first, drafters and trees as its listings have
         them (`suite_rows.py`), then the same rows with draftline's own defaults; a third profile
         goes from the papers' CORE, ANPD, Lookahead and REST to ours, one option after the other
heads    trained heads beside each other and beside what needs no training (`head_rows.py`)
model-drafters  small models: of the target's tokenizer and others, together, and under
         each rule of acceptance (`model_rows.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import filter as filter_names
from typing import Any

from ....cluster.config import DrafterConfig, EngineConfig
from ....core.errors import ConfigError
from ....measure.clients.setting import TARGET_ONLY, Setting
from .head_rows import HeadRows, bundled_heads, read_heads
from .job import BenchJob
from .model_rows import TREE_NODES as MODEL_TREE_NODES
from .model_rows import ModelRows
from .suite_rows import TREE_NODES, Stores, drafters_of, rows_of

# Every node is verified: what a row drafts then depends on no clock.
ENGINE_SETTINGS: dict[str, Any] = {"tree_nodes": TREE_NODES, "node_budget": "full"}


MODEL_DRAFTERS = "model-drafters"


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

    The bundled model's refined store, heads and small model need not be named. Raises
    `ConfigError`.
    """
    if job.base_url is not None or job.drafters is not None:
        raise ConfigError(
            "suite", "brings its own drafters and engines: leave out --base-url and --drafters"
        )
    is_bundled = settings.get("model", EngineConfig.model_fields["model"].default) == "demo"
    store = job.store or ("demo" if is_bundled else None)
    engine_settings = ENGINE_SETTINGS
    if job.suite == "heads":
        suite = heads_suite(job, store, is_bundled=is_bundled)
    elif job.suite == MODEL_DRAFTERS:
        suite = models_suite(job, is_bundled=is_bundled)
        engine_settings = ENGINE_SETTINGS | {"tree_nodes": MODEL_TREE_NODES}
    else:
        suite = spectra_suite(Stores(store, job.unrefined_store), job.profiles)
    if job.one_engine and any(setting.is_ordered for setting in suite.settings):
        raise ConfigError("one-engine", "profiles other than draftline need engines of their own")
    if suite.left_out:
        tell(f"left out, for want of a store: {', '.join(suite.left_out)}")
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


def heads_suite(job: BenchJob, store: str | None, *, is_bundled: bool) -> Suite:
    """The rows of the job's heads, before those of the bundled model's own.

    Raises `ConfigError` or `CheckpointError`.
    """
    given = read_heads(job.heads or "")
    bundled = bundled_heads() if is_bundled else {}
    known = given | {name: head for name, head in bundled.items() if name not in given}
    if not known:
        raise ConfigError("heads", "must name at least one trained head of the model: NAME=FOLDER")
    small_model = "demo-drafter" if is_bundled else None
    rows = HeadRows(known, bundled or known, small_model, store)
    settings = (Setting(TARGET_ONLY, ()), *rows.settings())
    return Suite(tuple(rows.drafters()), settings, ())


def models_suite(job: BenchJob, *, is_bundled: bool) -> Suite:
    """The rows of the bundled target's small models. Raises `ConfigError` for another target."""
    if not is_bundled:
        raise ConfigError(
            "suite", f"{MODEL_DRAFTERS} compares the small models of demo: bench demo"
        )
    rows = ModelRows(
        same="demo-drafter",
        other="demo-drafter-other-vocab",
        alphabet="demo-drafter-bytes",
        is_sampled=job.temperature > 0,
        is_timed=job.cost_profile is not None,
    )
    settings = (Setting(TARGET_ONLY, ()), *rows.settings())
    return Suite(tuple(rows.drafters()), settings, ())


def spectra_suite(stores: Stores, profiles: tuple[str, ...]) -> Suite:
    """The rows of these profiles whose stores are given."""
    drafters: dict[str, DrafterConfig] = {}
    settings, left_out = [Setting(TARGET_ONLY, ())], []
    for profile in profiles:
        drafters |= {drafter.source: drafter for drafter in drafters_of(profile, stores)}
        for row in rows_of(profile):
            if drafters.keys() >= set(row.drafters or ()):
                settings.append(row)
            else:
                left_out.append(row.name)
    return Suite(tuple(drafters.values()), tuple(settings), tuple(left_out))
