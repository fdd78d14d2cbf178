"""JSON schemas of request bodies, as this server takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .refused_fields import Refused

NULL = {"type": "null"}


def allow_null(schema: dict[str, Any]) -> None:
    """Every optional property may be null, in place."""
    required = schema.get("required", ())
    for name, found in schema.get("properties", {}).items():
        if name not in required and not _takes_null(found):
            moved = {key: found.pop(key) for key in list(found) if key not in ("title", "default")}
            found["anyOf"] = [moved, NULL]


def add_known(
    schema: dict[str, Any], refused: Mapping[str, Refused], ignored: Iterable[str]
) -> None:
    """Add the fields that are taken with neutral values only, and those that nothing reads."""
    properties = schema.setdefault("properties", {})
    for name, one in refused.items():
        values = [None, *one.neutral]
        properties[name] = {"enum": values, "description": f"not supported: {one.reason}"}
    for name in ignored:
        properties[name] = {"description": "changes nothing"}


def _takes_null(schema: Mapping[str, Any]) -> bool:
    if schema.get("type") == "null" or NULL in schema.get("anyOf", ()):
        return True
    # Without these words a schema takes anything.
    return not schema.keys() & {"type", "anyOf", "oneOf", "allOf", "$ref", "enum", "const"}
