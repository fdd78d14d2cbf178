"""Drafters behind gRPC."""

from support.servers.hub_fixtures import serve

__all__ = ["serve"]
