"""A process that replaces a store's content and stops at a chosen point, there to be killed.

`python doomed_writer.py URL POINT OLD_ID` prints `here` at the point and waits. Points:

    build        while documents are read
    upload       in the middle of the upload
    before       all is uploaded, and nothing of the switch has begun
    switch       half of the switch is done
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from draftline.retrieval_store.corpus.build import BuildSettings, build_corpus
from draftline.retrieval_store.corpus.documents import Document, DocumentRules, TokenizedDocument
from draftline.retrieval_store.delta.settings import Fingerprint
from draftline.retrieval_store.directory_store import store as directory_store
from draftline.retrieval_store.serving.open_store import open_store
from draftline.retrieval_store.store import SegmentStore


def stop_here(*_args: object, **_kwargs: object) -> Any:
    sys.stdout.write("here\n")
    sys.stdout.flush()
    while True:
        time.sleep(60)


def documents(point: str) -> Iterator[Document]:
    yield Document("first", "1 2 11")
    if point == "build":
        stop_here()
    yield Document("second", "1 2 12")


def stop_redis(store: Any, point: str) -> None:
    import redis.connection
    from draftline.retrieval_store.redis_store import store as redis_store

    redis_store.CHUNK_BYTES = 64
    if point == "before":
        store._switch = stop_here
    if point == "upload":
        seal, sealed = redis_store.seal, []

        def seal_three(payload: bytes) -> bytes:
            sealed.append(payload)
            return seal(payload) if len(sealed) <= 3 else stop_here()

        redis_store.seal = seal_three
    if point == "switch":
        send = redis.connection.AbstractConnection.send_packed_command

        def send_half(self: Any, command: Any, check_health: bool = True) -> None:
            whole = command if isinstance(command, bytes) else b"".join(command)
            if b"EXEC" in whole and b"PUBLISH" in whole:
                send(self, [whole[: whole.index(b"PUBLISH")]], check_health)
                stop_here()
            send(self, command, check_health)

        redis.connection.AbstractConnection.send_packed_command = send_half


def stop_directory(store: Any, point: str) -> None:
    replace = directory_store.replace_file
    if point == "before":
        store._switch = stop_here
    if point == "upload":
        os.fsync = stop_here
    if point == "switch":

        def replace_half(path: Path, content: bytes) -> None:
            if path.name == directory_store.MANIFEST:
                os.fsync = stop_here
            replace(path, content)

        directory_store.replace_file = replace_half


def main(url: str, point: str, old_id: str) -> None:
    store: SegmentStore = open_store(url)
    (stop_redis if url.startswith("redis") else stop_directory)(store, point)
    fingerprint = Fingerprint(tokenizer_hash="tokenizer", model_hash="model", vocab_size=32)
    settings = BuildSettings(
        fingerprint=fingerprint, rules=DocumentRules(min_tokens=1), max_segment_tokens=4
    )
    build_corpus(
        store,
        "shared",
        documents(point),
        lambda document: TokenizedDocument(np.array(document.text.split(), dtype=np.int32)),
        settings,
        remove=[old_id],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
