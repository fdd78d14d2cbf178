"""Options of drafters from their settings, and the hidden states that heads among them read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError
from ...core.proposals import FeatureLayers
from ...models.load.bundled import BUNDLED_HEADS
from ..checked_settings import unknown_key
from ..config import HEAD, PAPER, DrafterConfig, EngineConfig
from ..removed_settings import REMOVED_OPTIONS

if TYPE_CHECKING:
    from ...drafters.heads.last_stage import LastStageHeadSpec
    from ...models.load.model_info import ModelInfo

# A key of every drafter: which defaults its options have.
PROFILE = "profile"
DEFAULT = "draftline"
# A key of head drafters: where they run.
PLACEMENT = "placement"
LAST_STAGE, ACTOR = "last_stage", "actor"
HEAD_KEYS = ("model", PLACEMENT)
# EAGLE-2's tree: six levels of the ten best nodes.
HEAD_PAPER = {"top_k": 10, "num_tokens": 6}


def drafter_options(
    config: DrafterConfig,
    options: type,
    own_keys: Sequence[str],
    paper: Mapping[str, Any] | None = None,
) -> Any:
    """An object of `options`, the dataclass of the drafter's kind, with those of its profile.

    own_keys  of the kind that are no options of this class
    paper     what its profile of that name has in place of the defaults; None: there is none

    Raises `ConfigError` naming the key.
    """
    names = {field.name for field in fields(options)} - set(getattr(options, "FIXED", ()))
    given = config.options
    known = [*names, *own_keys, PROFILE]
    for key in given:
        if key in REMOVED_OPTIONS and key not in known:
            raise ConfigError(key, f"was removed; {REMOVED_OPTIONS[key]}")
        if key not in known:
            raise unknown_key(key, key, [*known, *DrafterConfig.model_fields])
    chosen = dict(_profile(config, paper))
    chosen |= {key: value for key, value in given.items() if key in names}
    if "max_nodes" in names:
        chosen["max_nodes"] = config.max_nodes
    return options(**chosen)


def _profile(config: DrafterConfig, paper: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Options that the profile has in place of the defaults."""
    profile = config.options.get(PROFILE, DEFAULT)
    if profile == DEFAULT:
        return {}
    profiles = DEFAULT if paper is None else f"{DEFAULT} or {PAPER}"
    if profile != PAPER or paper is None:
        raise ConfigError(PROFILE, f"of {config.kind} must be {profiles}, not {profile!r}")
    return paper


def feature_layers_of(config: EngineConfig, target: ModelInfo) -> tuple[int, ...]:
    """Layers of the target whose outputs all heads together read, ascending.

    Raises `CheckpointError`; `ConfigError` (`model`) for a head that does not fit the target.
    """
    heads = [one for one in config.drafters if one.kind == HEAD]
    if not heads:
        return ()
    # As other drafters' code that needs torch.
    from ...drafters.heads.drafter import feature_layers  # noqa: PLC0415

    read = (feature_layers(head_folder(head), target) for head in heads)
    return tuple(sorted(set().union(*read)))


def features_of_target(config: EngineConfig) -> FeatureLayers | None:
    """The hidden states that stages return; None without heads. Raises as `feature_layers_of`."""
    if all(drafter.kind != HEAD for drafter in config.drafters):
        return None
    # It needs transformers, which the servers of other drafters do without.
    from ...models.load.model_info import read_model_info  # noqa: PLC0415

    target = read_model_info(config.model)
    return FeatureLayers(feature_layers_of(config, target), target.hidden_size)


def is_in_last_stage(config: DrafterConfig) -> bool:
    """Whether a drafter is a head of the target's last stage.

    Raises `ConfigError`.
    """
    if config.kind != HEAD:
        return False
    placement = config.options.get(PLACEMENT)
    if placement not in (None, LAST_STAGE, ACTOR):
        raise ConfigError(PLACEMENT, f"must be {LAST_STAGE} or {ACTOR}, not {placement!r}")
    if config.transport != "inproc":
        if placement == LAST_STAGE:
            raise ConfigError(
                PLACEMENT, f"{LAST_STAGE} has no server; leave out transport, or set {ACTOR}"
            )
        return False
    return placement != ACTOR


def head_folder(config: DrafterConfig) -> Path:
    """The folder of a head. Raises `ConfigError` (`model`), `CheckpointError`."""
    folder = config.options.get("model")
    if not isinstance(folder, str) or not folder:
        raise ConfigError(
            "model",
            f"must be given: a trained head's folder or hub id, or {', '.join(BUNDLED_HEADS)}",
        )
    from ...models.load.checkpoint import resolve_head_path  # noqa: PLC0415 - as above

    return resolve_head_path(folder)


def last_stage_heads(
    config: EngineConfig, target: ModelInfo, layers: Sequence[int]
) -> tuple[LastStageHeadSpec, ...]:
    """The heads of the last stage, which has states of `layers`.

    Raises `CheckpointError`; `ConfigError` that names the drafter and the key.
    """
    heads = []
    for index, drafter in enumerate(config.drafters_with_defaults):
        try:
            if not is_in_last_stage(drafter):
                continue
            # As other drafters' code that needs torch.
            from ...drafters.heads.last_stage import LastStageHeadSpec  # noqa: PLC0415
            from ...drafters.heads.options import HeadOptions  # noqa: PLC0415

            options = drafter_options(drafter, HeadOptions, HEAD_KEYS, HEAD_PAPER)
            for key in ("device", "dtype"):
                if getattr(options, key) != "auto":
                    raise ConfigError(
                        key, f"is the last stage's; leave it out, or set {PLACEMENT}: {ACTOR}"
                    )
            given = FeatureLayers(tuple(layers), target.hidden_size)
            folder = head_folder(drafter)
        except ConfigError as error:
            raise ConfigError(f"drafters[{index}].{error.field}", error.message) from error
        name, max_nodes = drafter.source, drafter.max_nodes
        heads.append(LastStageHeadSpec(name, folder, target, given, options, max_nodes))
    return tuple(heads)
