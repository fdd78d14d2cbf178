"""Pieces of a segment's bytes, each behind the SHA-256 of what follows."""

from __future__ import annotations

import hashlib

from ...core.errors import DamagedError

DIGEST_BYTES = 32


def seal(payload: bytes) -> bytes:
    """The payload behind its digest."""
    return hashlib.sha256(payload).digest() + payload


def unseal(chunk: bytes, origin: str) -> bytes:
    """The payload. Raises `DamagedError`, which names `origin`, if a byte is missing or differs."""
    payload = chunk[DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != chunk[:DIGEST_BYTES]:
        raise DamagedError(f"{origin}: corrupt; build the corpus again")
    return payload
