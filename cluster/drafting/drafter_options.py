"""A drafter's options from its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...core.errors import ConfigError
from ..checked_settings import unknown_key
from ..config import DrafterConfig
from ..removed_settings import REMOVED_OPTIONS

# A key of every drafter: which defaults its options have.
PROFILE = "profile"
DEFAULT, PAPER = "draftline", "paper"


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
