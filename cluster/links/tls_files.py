"""Certificates of the connections between coordinators and servers, read from files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from ...core.errors import ConfigError
from ..config import DrafterConfig


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
            _read("tls.ca", self.ca),
            _read("tls.key", self.key),
            _read("tls.certificate", self.certificate),
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a server."""
        key, certificate = _read("tls.key", self.key), _read("tls.certificate", self.certificate)
        if key is None or certificate is None:
            raise ConfigError("tls", "a server needs both certificate and key")
        ca = _read("tls.ca", self.ca)
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


def _read(field: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(field, f"cannot read {path}: {error.strerror}") from error
