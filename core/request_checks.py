"""What the checks of a request's parameters are made of."""

from __future__ import annotations

import math
from typing import TypeGuard

from .errors import RequestError

MAX_INT32 = 2**31 - 1
# Most characters of a client's own input that an error repeats.
MAX_SHOWN = 80
MAX_SHOWN_INT = 10**40


def require(condition: bool, field: str, message: str) -> None:
    """Raise `RequestError` unless the condition holds."""
    if not condition:
        raise RequestError(field, message)


def is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_id(value: object) -> bool:
    """Whether a vocabulary could have it."""
    return is_whole(value) and 0 <= value <= MAX_INT32


def are_token_ids(value: object) -> bool:
    """Whether it is a tuple of token ids."""
    return isinstance(value, tuple) and all(is_token_id(item) for item in value)


def shortened(value: object) -> str:
    """A client's value as errors show it: the beginning of its `repr`, or its type's name."""
    if isinstance(value, str):
        # The repr of all of it would take as long as it is.
        return repr(value) if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]!r}..."
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return (
            str(value) if abs(value) < MAX_SHOWN_INT else f"a number of {value.bit_length()} bits"
        )
    return f"a {type(value).__name__}"
