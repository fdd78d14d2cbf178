"""Arguments of the gRPC servers that an operator starts: where to listen, TLS, tokens."""

from __future__ import annotations

import argparse
import ipaddress
from typing import Any

from ...cluster.links.access import Access, TlsFiles, read_access
from ...core.errors import ConfigError


def add_listen_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the address, the certificates and the tokens."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: the system chooses")
    parser.add_argument("--tls-certificate", help="PEM file; with it, connections need TLS")
    parser.add_argument("--tls-key", help="PEM file")
    parser.add_argument("--tls-ca", help="PEM file; with it, clients need a certificate")
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help="environment variable with lines `TOKEN namespace1,namespace2` or `TOKEN *`; calls "
        "need one of these tokens",
    )
    parser.add_argument("--token-file", metavar="FILE", help="the same lines in a file")
    parser.add_argument(
        "--allow-unauthenticated",
        action="store_true",
        help="listen on other than loopback without tokens: any client of the port is served",
    )


def listen_settings(given: argparse.Namespace) -> dict[str, Any]:
    """The parsed arguments of `add_listen_arguments` as a server's: host, port, tls, access.

    Raises `ConfigError` for a server that would serve other machines without tokens.
    """
    tls = TlsFiles(ca=given.tls_ca, certificate=given.tls_certificate, key=given.tls_key)
    access = read_access(given.token_env, given.token_file)
    if access is None and not given.allow_unauthenticated and not is_loopback(given.host):
        raise ConfigError(
            "host",
            f"{given.host} is reached from other machines; give --token-file or --token-env, or "
            "--allow-unauthenticated if nobody else can reach it",
        )
    has_tls = tls != TlsFiles()
    return {
        "host": given.host,
        "port": given.port,
        "tls": tls if has_tls else None,
        "access": access,
    }


def require_whole_scopes(access: Access | None) -> None:
    """Raise `ConfigError` for tokens limited to some namespaces, on a server without namespaces."""
    if access is not None and not access.is_everything:
        raise ConfigError(
            "token_file", "a drafter server serves all namespaces; write `TOKEN *` in each line"
        )


def is_loopback(host: str) -> bool:
    """Whether a server on this address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
