"""Values of settings as errors and logs may show them: short, and without secrets."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_CHARS = 80
# Whole words of a field's name: `kv_cache_tokens` is none of them.
SECRET_NAME = re.compile(r"(^|_)(api_key|key|keys|password|secret|token)($|_)")
HIDDEN = "***"
# What stands between the scheme and the last @ of a URL; a password may hold anything else.
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^\s@/:]*)(:?)[^\s]*@")
_QUERY = re.compile(r"([?&](?:password|username|token|secret|key)=)[^&\s]*", re.IGNORECASE)


def redacted(text: str) -> str:
    """The text with the passwords of its URLs as `***`: `redis://user:***@host`."""
    text = _USER.sub(lambda found: f"{found[1]}{found[2]}:{HIDDEN}@" if found[3] else f"{found[1]}{HIDDEN}@", text)
    return _QUERY.sub(rf"\1{HIDDEN}", text)


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
