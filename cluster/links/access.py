"""TLS files and access tokens of the gRPC connections between draftline's processes."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from ...core.errors import ConfigError
from ..config import DrafterConfig

HEADER = "authorization"
PREFIX = "Bearer "
# What can be guessed protects nothing; `new_token` gives 43.
MIN_CHARS = 16
# May stand behind a token in files of earlier releases, where it meant all namespaces.
EVERY_NAMESPACE = "*"
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one side.

    ca                what the other side's certificate is checked with; a server that has one
                      asks every client for a certificate (mutual TLS)
    server_name       what a server's certificate must name, where that is not the address's host
    certificate, key  the own identity; a server needs them, a client only for mutual TLS

    The credentials raise `ConfigError` that names the file that cannot be read.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    server_name: str | None = None

    def channel_options(self) -> list[tuple[str, str]]:
        """gRPC options of a client."""
        if self.server_name is None:
            return []
        return [("grpc.ssl_target_name_override", self.server_name)]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a client; without `ca` the system's authorities count."""
        return grpc.ssl_channel_credentials(
            _file("tls.ca", self.ca),
            _file("tls.key", self.key),
            _file("tls.certificate", self.certificate),
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a server."""
        key, certificate = _file("tls.key", self.key), _file("tls.certificate", self.certificate)
        if key is None or certificate is None:
            raise ConfigError("tls", "a server needs both certificate and key")
        ca = _file("tls.ca", self.ca)
        return grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=ca, require_client_auth=ca is not None
        )


def drafter_tls(config: DrafterConfig) -> TlsFiles | None:
    """TLS files of a drafter's connections; None: plain text."""
    if not config.has_tls:
        return None
    return TlsFiles(
        ca=config.tls_ca,
        certificate=config.tls_certificate,
        key=config.tls_key,
        server_name=config.tls_server_name,
    )


def _file(field: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(field, f"cannot read {path}: {error.strerror}") from error


def new_token() -> str:
    """A random token for the servers that an engine starts by itself."""
    return secrets.token_urlsafe(32)


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """What a client sends with every call; nothing without a token."""
    return () if token is None else ((HEADER, PREFIX + token),)


class Access:
    """Who may call a server: digests of its tokens."""

    def __init__(self, *tokens: str) -> None:
        self._digests = [_digest(token) for token in tokens]

    def allows(self, metadata: Metadata | None) -> bool:
        """Whether the caller has a token of this server.

        Takes as long whether and where a token agrees.
        """
        given = _digest(_bearer(metadata or ()))
        agree = [hmac.compare_digest(digest, given) for digest in self._digests]
        return any(agree)


def read_access(env: str | None, file: str | None) -> Access | None:
    """The tokens of a server, one a line.

    From an environment variable, which children do not inherit then, or from a file; None where
    neither is named. Raises `ConfigError`, which tells no token.
    """
    if env is None and file is None:
        return None
    field, lines = _lines(env, file)
    if env is not None:
        del os.environ[env]
    return Access(*(_token(field, number, line) for number, line in lines))


def read_token(env: str | None, file: str | None) -> str | None:
    """The token that a client sends: the first one of the variable or of the file.

    None where neither is named. Raises `ConfigError`, which tells no token.
    """
    if env is None and file is None:
        return None
    field, lines = _lines(env, file)
    return _token(field, *lines[0])


def _lines(env: str | None, file: str | None) -> tuple[str, list[tuple[int, str]]]:
    """The field and its numbered lines, at least one; empty ones and `#` comments left out."""
    if env is not None and file is not None:
        raise ConfigError("token_file", "token_env is given, too; leave one of them out")
    if file is None:
        field, source = "token_env", f"the environment variable {env}"
        text = os.environ.get(env or "", "")
    else:
        field, source, text = "token_file", file, _text(file)
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line and line[0] != "#"]
    if not lines:
        raise ConfigError(field, f"{source} is not set, or holds no token")
    return field, lines


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("token_file", f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("token_file", f"{file} is not a text file") from error


def _token(field: str, number: int, line: str) -> str:
    token, *rest = line.split()
    if rest not in ([], [EVERY_NAMESPACE]):
        raise ConfigError(
            field,
            f"line {number}: namespaces of tokens were removed; write the token alone, which is "
            "for all namespaces",
        )
    if len(token) < MIN_CHARS or not token.isascii() or not token.isprintable():
        raise ConfigError(
            field,
            f"line {number}: a token is {MIN_CHARS} or more printable ASCII characters, such as "
            "`openssl rand -hex 32` gives",
        )
    return token


def _bearer(metadata: Metadata) -> str:
    for key, value in metadata:
        if key == HEADER and isinstance(value, str) and value.startswith(PREFIX):
            return value.removeprefix(PREFIX)
    return ""


def _digest(token: str) -> bytes:
    # Digests are of one length, so that comparing them tells nothing of a token's.
    return hashlib.sha256(token.encode()).digest()
