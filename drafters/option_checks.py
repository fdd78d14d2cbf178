"""Checks of drafter options; every failure is a `ConfigError` that names the option."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.errors import ConfigError


def require_whole(field: str, value: object, low: int, high: int = 2**31 - 1) -> None:
    """Raise `ConfigError` unless `value` is a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(field, f"must be a whole number from {low} to {high}, not {value!r}")


def require_number(field: str, value: object, low: float) -> None:
    """Raise `ConfigError` unless `value` is a finite number of at least `low`."""
    # Not a number compares false, so it is refused too.
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < math.inf:
        raise ConfigError(field, f"must be a finite number of at least {low}, not {value!r}")


def require_fraction(field: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a number from 0 to 1."""
    # Not a number compares false, so it is refused too.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(field, f"must be a number from 0 to 1, not {value!r}")


def require_one_of(field: str, value: object, known: Sequence[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `known`."""
    if value not in known:
        raise ConfigError(field, f"must be one of {', '.join(known)}, not {value!r}")


def require_switches(options: object, *fields: str) -> None:
    """Raise `ConfigError` unless each of the named attributes is true or false."""
    for field in fields:
        value = getattr(options, field)
        if not isinstance(value, bool):
            raise ConfigError(field, f"must be true or false, not {value!r}")
