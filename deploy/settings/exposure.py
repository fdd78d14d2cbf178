"""Checks that a server is not open to others, and its keys not readable, by mistake."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...core.errors import ConfigError

if TYPE_CHECKING:
    from .settings import ServerConfig

KEY_VARIABLE = "DRAFTLINE_API_KEY"
KEY_FLAG = "--api-key"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at `host`; a name other than localhost is not.

    An empty host is every address.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_keys(config: ServerConfig, host: str) -> None:
    """Raise `ConfigError` where others than this machine's users would be served without a key."""
    if config.has_keys or config.allow_unauthenticated or is_loopback(host):
        return
    raise ConfigError(
        "server.host",
        f"{host!r} is reached from other machines, and no API key is set: set {KEY_VARIABLE}, "
        "server.api_key_file or server.tenants, or say --allow-unauthenticated "
        "(server.allow_unauthenticated) to serve without keys",
    )


def check_key_variable(environment: Mapping[str, str]) -> None:
    """Raise `ConfigError` if the variable is there but empty: it would open the server to all."""
    if not environment.get(KEY_VARIABLE, KEY_VARIABLE).strip():
        raise ConfigError(KEY_VARIABLE, "is set but empty; give it a key, or unset it")


def without_keys(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line without its keys, and the keys.

    Every user of a machine sees the command lines of all processes, and Ray's job table shows that
    of the driver; a process's environment is its owner's.
    """
    rest: list[str] = []
    keys: list[str] = []
    values = iter(arguments)
    for argument in values:
        name, is_joined, value = argument.partition("=")
        if name == KEY_FLAG:
            keys.append(value if is_joined else next(values, ""))
        else:
            rest.append(argument)
    return rest, keys
