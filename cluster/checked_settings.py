"""Settings that name what is wrong with them, and never show what is secret."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from ..core.errors import ConfigError
from .removed_settings import REMOVED_SETTINGS, removed_value

MAX_CHARS = 80
# Whole words of a field's name: `kv_cache_tokens` is none of them.
SECRET_NAME = re.compile(r"(^|_)(api_key|key|keys|password|secret|token)($|_)")
HIDDEN = "***"
# What stands between the scheme and the last @ of a URL; a password may hold anything else.
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^\s@/:]*)(:?)[^\s]*@")
_QUERY = re.compile(r"([?&](?:password|username|token|secret|key)=)[^&\s]*", re.IGNORECASE)


def unknown_key(field: str, key: str, known: list[str]) -> ConfigError:
    """The error for a key that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return ConfigError(redacted(field), f"unknown key {redacted(key)!r}; {hint}")


class Settings(BaseModel):
    """Reports wrong input as `ConfigError` that names the field.

    Neither that nor its `repr` shows passwords of URLs or values of fields that are named as
    secrets.
    """

    def __init__(self, **values: Any) -> None:
        extra = self.model_config.get("extra")
        known = list(type(self).model_fields)
        for key, value in values.items():
            if key not in known and extra != "allow":
                if key in REMOVED_SETTINGS:
                    raise ConfigError(key, f"was removed; {REMOVED_SETTINGS[key]}")
                raise unknown_key(key, key, known)
            if (removed := removed_value(key, value)) is not None:
                raise ConfigError(key, removed)
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "config"
            got = shown(first["input"], first["loc"])
            # The text of `error` itself has the whole input.
            raise ConfigError(field, f"{first['msg']} (got {got})") from None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            is_nested = isinstance(value, tuple) and all(
                isinstance(item, Settings) for item in value
            )
            if isinstance(value, Settings) or is_nested or value is None:
                yield name, value
            else:
                yield name, _Shown(shown(value, () if name is None else (name,)))


class _Shown(str):
    """A text whose `repr` is itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def redacted(text: str) -> str:
    """The text with the passwords of its URLs as `***`: `redis://user:***@host`."""
    text = _USER.sub(_hide_user, text)
    return _QUERY.sub(rf"\1{HIDDEN}", text)


def _hide_user(address: re.Match[str]) -> str:
    scheme, user, colon = address.groups()
    # Without a colon the only word may be a password, too.
    return f"{scheme}{user}:{HIDDEN}@" if colon else f"{scheme}{HIDDEN}@"


def shown(value: object, path: Sequence[str | int] = ()) -> str:
    """How a message shows a value that stands at `path` in the settings.

    Of a mapping and of a list only its size: they may hold anything.
    """
    if any(isinstance(name, str) and SECRET_NAME.search(name) for name in path):
        return "a value that is not shown"
    if isinstance(value, dict):
        return f"a mapping of {len(value)} keys"
    if isinstance(value, list | tuple | set):
        return f"a list of {len(value)}"
    text = redacted(repr(value))
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "..."
