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
    settings: Mapping[str, BaseModel | None], stats: Mapping[str, Sequence[EngineStats]]
) -> dict[str, Any]:
    """Versions, settings by section without their secrets, and what each engine does now.

    `stats` by model.
    """
    return {
        "version": __version__,
        "versions": versions(),
        **{name: shown(section) for name, section in settings.items()},
        "engines": [
            {
                "model": model,
                "engine_id": engine.engine_id,
                "num_running": engine.num_running,
                "num_waiting": engine.num_waiting,
                "kv_usage": engine.kv_usage,
                "num_steps": engine.num_steps,
                "drafters": [
                    {
                        "name": drafter.name,
                        "connected": drafter.connected,
                        "left_out": drafter.left_out,
                    }
                    for drafter in engine.drafters
                ],
            }
            for model, engines in stats.items()
            for engine in engines
        ],
    }


def shown(settings: BaseModel | None) -> dict[str, Any] | None:
    """Settings without their secrets."""
    return None if settings is None else without_secrets(settings.model_dump())


def server_load(stats: Sequence[EngineStats]) -> dict[str, int]:
    """Requests that run or wait; `server_load` is vLLM's name for all of them."""
    running = sum(engine.num_running for engine in stats)
    waiting = sum(engine.num_waiting for engine in stats)
    return {"server_load": running + waiting, "num_running": running, "num_waiting": waiting}


def versions() -> dict[str, str]:
    """Versions of Python and of those of `LIBRARIES` that are installed."""
    by_name = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return by_name


def without_secrets(value: Any, name: str = "") -> Any:
    """The value as JSON, with secrets hidden: by their names, and in addresses."""
    if isinstance(value, Mapping):
        return {str(key): without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [without_secrets(item, name) for item in value]
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
