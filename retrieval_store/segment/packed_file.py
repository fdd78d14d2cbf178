"""A checked container of named arrays: one block of bytes, to be memory-mapped or sent sealed.

Layout, integers little-endian:

    0   8 bytes   magic
    8   uint32    format version
    12  uint32    length of the header, padding included
    16  32 bytes  SHA-256 of the header
    48  header    JSON, padded with spaces: `fields`, and of each array its name, dtype, shape,
                  start, size and SHA-256; arrays follow one another, padded with zero bytes

Every byte is covered: by a comparison (magic, version), by the header's digest or by an array's.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import DamagedError, StoreError

MAGIC = b"DRAFTSEG"
FORMAT_VERSION = 2
ALIGNMENT = 64
PREFIX = struct.Struct("<8sII32s")
REMEDY = "restore the file, or build the corpus again and put it in its place"

Data = bytes | mmap.mmap | memoryview
AnyArray = NDArray[Any]
DIGEST_BYTES = 32


def pack(fields: Mapping[str, object], arrays: Mapping[str, AnyArray]) -> bytes:
    """One block of bytes that holds `fields` (JSON values) and `arrays` in their own dtypes."""
    # Views and their padding: large arrays are copied only once, into the block.
    payloads: list[memoryview | bytes] = []
    entries, start = [], 0
    for name, array in arrays.items():
        content = np.ascontiguousarray(array).data.cast("B") if array.size else b""
        padding = b"\0" * (-len(content) % ALIGNMENT)
        size = len(content) + len(padding)
        entry = {"name": name, "dtype": array.dtype.str, "shape": array.shape, "start": start}
        entries.append(entry | {"size": size, "sha256": _digest(content, padding).hex()})
        payloads += [content, padding]
        start += size
    text = json.dumps({"fields": dict(fields), "arrays": entries}, sort_keys=True).encode()
    header = text + b" " * (-(PREFIX.size + len(text)) % ALIGNMENT)
    prefix = PREFIX.pack(MAGIC, FORMAT_VERSION, len(header), _digest(header))
    return b"".join([prefix, header, *payloads])


def unpack(data: Data, origin: str) -> tuple[dict[str, Any], dict[str, AnyArray]]:
    """The fields and the arrays (read-only views into `data`) of what `pack` wrote.

    `origin` names the file in messages. Raises `DamagedError` if a byte is missing or differs.
    """
    header, start = _read_header(data, origin)
    end = start
    arrays = {}
    for entry in header["arrays"]:
        first, end = start + entry["start"], start + entry["start"] + entry["size"]
        stored = memoryview(data)[first:end]
        if len(stored) != entry["size"] or _digest(stored).hex() != entry["sha256"]:
            raise DamagedError(f"{origin}: array {entry['name']!r} is corrupt; {REMEDY}")
        shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
        count = int(np.prod(shape))
        arrays[entry["name"]] = np.frombuffer(data, dtype, count, first).reshape(shape)
    if len(data) != end:
        raise DamagedError(f"{origin}: {len(data) - end} bytes after the last array; {REMEDY}")
    return header["fields"], arrays


def _read_header(data: Data, origin: str) -> tuple[dict[str, Any], int]:
    if len(data) < PREFIX.size:
        raise DamagedError(f"{origin}: too short for a segment ({len(data)} bytes); {REMEDY}")
    magic, version, header_len, digest = PREFIX.unpack(data[: PREFIX.size])
    if magic != MAGIC:
        raise DamagedError(f"{origin}: not a draftline segment; {REMEDY}")
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{origin}: format version {version}, this draftline reads {FORMAT_VERSION}; "
            "build the corpus again with this version"
        )
    start = PREFIX.size + header_len
    header = bytes(data[PREFIX.size : start])
    if _digest(header) != digest:
        raise DamagedError(f"{origin}: the header is corrupt; {REMEDY}")
    return json.loads(header), start


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def seal(payload: bytes) -> bytes:
    """The digest, followed by the payload."""
    return hashlib.sha256(payload).digest() + payload


def unseal(chunk: bytes, origin: str) -> bytes:
    """The payload. Raises `DamagedError`, which names `origin`, if a byte is missing or differs."""
    payload = chunk[DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != chunk[:DIGEST_BYTES]:
        raise DamagedError(f"{origin}: corrupt; build the corpus again")
    return payload
