"""The bundled demo's retrieval store, built once from the sources of the standard library.

`store: demo` of a retrieval drafter means it. Held-out files are left out, as in training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..cluster.config import DrafterConfig, EngineConfig
from ..models.model_info import read_model_info
from ..models.tokenizer import load_tokenizer
from ..retrieval_store.build import BuildSettings, Fitness, build_corpus
from ..retrieval_store.documents import Document
from ..retrieval_store.fingerprint import model_hash, tokenizer_hash
from ..retrieval_store.open_store import open_store
from ..training.corpus import training_files
from .settings import ServeArgs

DEMO_STORE = "demo"
# Takes seconds to tokenise and sort on one core; more text brings the small model little.
MAX_CHARS = 3_000_000
SHARED = "shared"


def with_demo_store(args: ServeArgs) -> ServeArgs:
    """`args` with the demo store's folder in place of its name, built if it is not there yet."""
    drafters = args.engine.drafters
    if all(drafter.options.get("store") != DEMO_STORE for drafter in drafters):
        return args
    folder = str(build_demo_store(args.engine))
    changed = tuple(_with_folder(drafter, folder) for drafter in drafters)
    return replace(args, engine=args.engine.model_copy(update={"drafters": changed}))


def build_demo_store(engine: EngineConfig) -> Path:
    """The folder of the store for the model's tokenizer, in the user's cache."""
    info = read_model_info(engine.model)
    tokens_of = tokenizer_hash(info.path)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "draftline" / f"demo-store-{tokens_of}"
    store = open_store(str(folder))
    if store.manifest().segment_ids(SHARED):
        return folder
    tokenizer = load_tokenizer(info.path)
    fitness = Fitness(
        tokenizer_hash=tokens_of, model_hash=model_hash(info.path), vocab_size=info.vocab_size
    )
    build_corpus(
        store,
        SHARED,
        _documents(),
        lambda text: np.array(tokenizer(text, verbose=False)["input_ids"], dtype=np.int32),
        BuildSettings(fitness=fitness),
    )
    return folder


def _documents() -> Iterator[Document]:
    room = MAX_CHARS
    for file in training_files():
        if len(file.text) <= room:
            room -= len(file.text)
            yield Document(file.name, file.text)


def _with_folder(drafter: DrafterConfig, folder: str) -> DrafterConfig:
    if drafter.options.get("store") != DEMO_STORE:
        return drafter
    settings: dict[str, Any] = drafter.model_dump() | {"store": folder}
    return DrafterConfig(**settings)
