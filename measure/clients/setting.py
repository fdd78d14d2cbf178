"""The settings to compare: the target alone, and sets of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import ConfigError

TARGET_ONLY = "target"
ALL = "all"


@dataclass(frozen=True, slots=True)
class Setting:
    """The options that may differ between runs of the same requests.

    drafters   the allowed drafters; empty is plain decoding, None leaves the choice to the server
    is_ordered trees are filled in the order of drafters (`node_budget: ordered`)
    acceptance its acceptance rule, if not the engine's
    """

    name: str
    drafters: tuple[str, ...] | None
    is_ordered: bool = False
    acceptance: str | None = None


def matched_settings(known: Sequence[str], chosen: str | None) -> list[Setting]:
    """Settings to compare: the target alone first, then what `chosen` lists.

    known   names of the drafters there are
    chosen  comma-separated names, `+` joins several, `all` means all; None: each alone, and all

    Raises `ConfigError` for an unknown drafter.
    """
    settings = [Setting(TARGET_ONLY, ())]
    if chosen is None:
        settings += [Setting(name, (name,)) for name in known]
        return settings if len(known) < 2 else [*settings, Setting(ALL, tuple(known))]
    for name in filter(None, (part.strip() for part in chosen.split(","))):
        drafters = tuple(known) if name == ALL else tuple(name.split("+"))
        for drafter in drafters:
            if drafter not in known:
                raise ConfigError(
                    "drafters", f"{drafter!r} is not there; known: {', '.join(known) or 'none'}"
                )
        settings.append(Setting(name, drafters))
    return settings
