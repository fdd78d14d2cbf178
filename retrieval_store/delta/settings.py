"""Bounds of learning: how much is kept, and for how long.

See docs/retrieval.md, "Learning".
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSettings:
    """Bounds of what one namespace learns; raises `ConfigError` naming the field.

    log_entries    most events of a log
    log_seconds    age in seconds at which events leave the log
    delta_tokens   most tokens of texts that are not folded yet, in memory
    fold_tokens    tokens in the log at which it is folded
    fold_entries   events in the log at which it is folded
    folded_tokens  most tokens of folded texts
    half_life      seconds in which a weight halves
    """

    log_entries: int = 4096
    log_seconds: float = 86_400.0
    delta_tokens: int = 131_072
    fold_tokens: int = 32_768
    fold_entries: int = 256
    folded_tokens: int = 262_144
    half_life: float = 86_400.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(field.name, f"must be above 0, got {getattr(self, field.name)}")
