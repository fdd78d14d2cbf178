"""TLS files and access tokens of the gRPC connections between draftline's processes."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc

from ...core.errors import ConfigError
from ...retrieval_store.search.lookup import SHARED
from ...retrieval_store.store import check_namespace
from ..config import DrafterConfig

HEADER = "authorization"
PREFIX = "Bearer "
# What can be guessed protects nothing; `new_token` gives 43.
MIN_CHARS = 16
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


@dataclass(frozen=True, slots=True)
class Scope:
    """The namespaces that a token may read and have learned; `*` is all of them."""

    namespaces: frozenset[str] = frozenset({EVERY_NAMESPACE})

    @property
    def is_everything(self) -> bool:
        """Whether no namespace is outside of it."""
        return EVERY_NAMESPACE in self.namespaces

    def may_read(self, namespace: str) -> bool:
        """Whether the namespace is listed, or the one that all may read."""
        return namespace == SHARED or self.may_write(namespace)

    def may_write(self, namespace: str) -> bool:
        """Whether the namespace is listed."""
        return self.is_everything or namespace in self.namespaces


class Access:
    """Who may call a server: digests of its tokens, each with its scope."""

    def __init__(self, scopes: Sequence[tuple[str, Scope]]) -> None:
        self._scopes = [(_digest(token), scope) for token, scope in scopes]

    @classmethod
    def single(cls, token: str) -> Self:
        """One token that may do everything."""
        return cls([(token, Scope())])

    @property
    def is_everything(self) -> bool:
        """Whether no token is limited to some namespaces."""
        return all(scope.is_everything for _, scope in self._scopes)

    def scope(self, metadata: Metadata | None) -> Scope | None:
        """What the caller may do; None: it has no token of this server.

        Takes as long whether and where a token agrees.
        """
        given = _digest(_bearer(metadata or ()))
        matching = None
        for digest, scope in self._scopes:
            if hmac.compare_digest(digest, given):
                matching = scope
        return matching


def read_access(env: str | None, file: str | None) -> Access | None:
    """The tokens of a server, one a line: `TOKEN namespace1,namespace2`, or `TOKEN *`.

    From an environment variable, which children do not inherit then, or from a file; None where
    neither is named. Raises `ConfigError`, which tells no token.
    """
    if env is None and file is None:
        return None
    field, lines = _lines(env, file)
    if env is not None:
        del os.environ[env]
    scopes = [_scope(field, number, line) for number, line in lines]
    tokens = [token for token, _ in scopes]
    if len(set(tokens)) < len(tokens):
        raise ConfigError(field, "holds one token twice; list all of its namespaces in one line")
    return Access(scopes)


def read_token(env: str | None, file: str | None) -> str | None:
    """The token that a client sends: the first word of the variable or of the file.

    None where neither is named. Raises `ConfigError`, which tells no token.
    """
    if env is None and file is None:
        return None
    field, lines = _lines(env, file)
    number, line = lines[0]
    return _checked(field, number, line.split()[0])


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


def _scope(field: str, number: int, line: str) -> tuple[str, Scope]:
    token, *listed = line.split()
    _checked(field, number, token)
    if len(listed) != 1:
        raise ConfigError(
            field,
            f"line {number}: write TOKEN and its namespaces with commas between, or TOKEN *",
        )
    names = listed[0].split(",")
    for name in names:
        if name != EVERY_NAMESPACE:
            try:
                check_namespace(name)
            except ConfigError as error:
                raise ConfigError(field, f"line {number}: {error.message}") from error
    return token, Scope(frozenset(names))


def _checked(field: str, number: int, token: str) -> str:
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
