"""A drafter's options from its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ...core.errors import CheckpointError, ConfigError
from ..checked_settings import unknown_key
from ..config import CASCADE, DrafterConfig

# A key of every drafter: which defaults its options have.
PROFILE = "profile"
DEFAULT, PAPER = "draftline", "paper"
# Of a query, as `DrafterConfig.max_nodes` allows.
MOST_NODES = 256


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
    names = {field.name for field in fields(options)}
    given = config.options
    known = [*names, *own_keys, PROFILE]
    for key in given:
        if key not in known:
            raise unknown_key(key, key, [*known, *DrafterConfig.model_fields])
    chosen = dict(_profile(config, paper))
    chosen |= {key: value for key, value in given.items() if key in names}
    if "max_nodes" in names:
        chosen["max_nodes"] = config.max_nodes
    return options(**chosen)


# Kinds of drafters that a cascade is made of, and settings that belong to the cascade alone.
MEMBERS = ("model", "anpd")
OF_THE_WHOLE = {*DrafterConfig.model_fields, "num_tokens", "distribution_size"} - {"kind", "name"}


def cascade_members(config: DrafterConfig) -> list[DrafterConfig]:
    """The settings of the drafters that a cascade is made of, the best one first.

    Raises `ConfigError` naming the drafter and its key.
    """
    given = config.options.get("drafters")
    if not isinstance(given, list | tuple) or not all(isinstance(one, dict) for one in given):
        raise ConfigError("drafters", "must be a list of drafters, the best one first")
    members = []
    for index, one in enumerate(given):
        field = f"drafters[{index}]"
        if one.get("kind") not in MEMBERS:
            known = " or ".join(MEMBERS)
            raise ConfigError(f"{field}.kind", f"of a cascade must be {known}: {one.get('kind')!r}")
        for key in OF_THE_WHOLE & one.keys():
            raise ConfigError(f"{field}.{key}", "is of the cascade as a whole; leave it out")
        name = one.get("name") or f"{config.source}.{index}"
        whole = {"name": name, "max_nodes": MOST_NODES, "transport": config.transport}
        member = DrafterConfig(**{**one, **whole})
        _check_member(member, index)
        members.append(member)
    return members


def with_lengths(member: DrafterConfig, num_tokens: int, size: int) -> DrafterConfig:
    """A member that writes chains of so many tokens; a model declares distributions of `size`."""
    declared = {"distribution_size": size} if member.kind == "model" else {}
    return DrafterConfig(**{**member.model_dump(), **declared, "num_tokens": num_tokens})


def may_read_chat(config: DrafterConfig, target: str) -> bool:
    """Whether a drafter may ask for the chats that prompts were made of (`ChatReader`).

    Where only its server can tell, it may. `target` is the served model. Raises `ConfigError` as
    `cascade_members`.
    """
    if config.address is not None or config.drafter_pool is not None:
        return config.kind in ("model", CASCADE)
    if config.kind == CASCADE:
        return any(may_read_chat(member, target) for member in cascade_members(config))
    return config.kind == "model" and _may_have_chat(config.options, target)


def _may_have_chat(options: Mapping[str, Any], target: str) -> bool:
    """Whether a model of such options reads chats by a template of its own."""
    from ...drafters.model.vocabulary.names import CHAT_TARGET  # noqa: PLC0415 - takes seconds
    from ...models.text.fingerprint import tokenizer_hash  # noqa: PLC0415

    model = options.get("model")
    if not isinstance(model, str) or options.get("chat_template") == CHAT_TARGET:
        return False
    try:
        return tokenizer_hash(model) != tokenizer_hash(target)
    except CheckpointError:
        # It may be of another machine.
        return True


def _check_member(member: DrafterConfig, index: int) -> None:
    """Raise `ConfigError` unless a member writes chains that others may go on behind."""
    if member.kind != "model":
        return
    wanted: dict[str, Any] = {"tree": "chain", "branch": 0, "ahead": False}
    if index:
        wanted["stop"] = "constant"
    for key, value in wanted.items():
        if member.options.get(key, value) != value:
            raise ConfigError(
                f"drafters[{index}].{key}", f"must be {value!r} there, not {member.options[key]!r}"
            )


def _profile(config: DrafterConfig, paper: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Options that the profile has in place of the defaults."""
    profile = config.options.get(PROFILE, DEFAULT)
    if profile == DEFAULT:
        return {}
    profiles = DEFAULT if paper is None else f"{DEFAULT} or {PAPER}"
    if profile != PAPER or paper is None:
        raise ConfigError(PROFILE, f"of {config.kind} must be {profiles}, not {profile!r}")
    return paper
