"""What a server is and how loaded it is, for its operator."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, SecretStr

from .... import __version__
from ...engine.stats import EngineStats

LIBRARIES = ("torch", "transformers", "ray", "fastapi", "uvicorn", "llguidance", "openai")
HIDDEN = "***"
# Names of settings whose texts are secrets, or lead to them.
SECRET = re.compile(r"(^|_)(keys?|sha256|secret|password|passwd|token|credentials?)(_|$)", re.I)


def server_info(
    settings: Mapping[str, BaseModel | None], stats: Sequence[EngineStats]
) -> dict[str, Any]:
    """Versions, settings by section without their secrets, and what each engine does now."""
    shown = {
        name: None if section is None else without_secrets(section.model_dump())
        for name, section in settings.items()
    }
    return {
        "version": __version__,
        "versions": versions(),
        **shown,
        "engines": [
            {
                "engine_id": one.engine_id,
                "num_running": one.num_running,
                "num_waiting": one.num_waiting,
                "kv_usage": one.kv_usage,
                "num_steps": one.num_steps,
                "drafters": [
                    {"name": drafter.name, "connected": drafter.connected}
                    for drafter in one.drafters
                ],
            }
            for one in stats
        ],
    }


def server_load(stats: Sequence[EngineStats]) -> dict[str, int]:
    """Requests that run or wait; `server_load` is vLLM's name for all of them."""
    running = sum(one.num_running for one in stats)
    waiting = sum(one.num_waiting for one in stats)
    return {"server_load": running + waiting, "num_running": running, "num_waiting": waiting}


def versions() -> dict[str, str]:
    """Versions of Python and of those of `LIBRARIES` that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def without_secrets(value: Any, name: str = "") -> Any:
    """The same in JSON's terms, with secrets hidden: by their names, and in addresses."""
    if isinstance(value, Mapping):
        return {str(key): without_secrets(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [without_secrets(one, name) for one in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, SecretStr) or SECRET.search(name):
        return HIDDEN
    return _without_password(str(value))


def _without_password(text: str) -> str:
    """The text; an address loses the user and the password that stand in it."""
    if "://" not in text or "@" not in text:
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        return HIDDEN
    if "@" not in parts.netloc:
        return text
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{HIDDEN}@{host}"))
