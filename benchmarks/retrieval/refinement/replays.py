"""Tau of stores, by replay of what the target answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ....cluster.config import DrafterConfig
from ....core.arrays import Float64, Int32
from ....deploy.cli.bench.job import BenchJob
from ....deploy.cli.bench.run import measured_runs
from ....deploy.cli.bench.suite import ENGINE_SETTINGS
from ....deploy.cli.bench.suite_rows import GUESS_LEN, TREE_NODES
from ....deploy.cli.corpus.model import CorpusModel, Limits
from ....deploy.cli.demo.build_store import NAMESPACE
from ....measure.clients.setting import TARGET_ONLY, Setting
from ....measure.report.intervals import counts_of
from ....retrieval_store.directory_store.store import DirectoryStore
from ....retrieval_store.search.lookup import SHARED, SegmentLookup
from ....retrieval_store.segment.segment import MAX_CONTEXT, Segment, build_segment

# CORE without its pool asks the target nothing, so that a replay is exact with any store.
CORE = DrafterConfig(
    kind="spectra", name="core", max_nodes=TREE_NODES, guess_len=GUESS_LEN, pool=False
)
# Stores that are open at once.
BATCH = 12
# Contexts whose lookups are timed, times that each is, and nodes of an answer.
NUM_CONTEXTS, NUM_TIMES, LOOKUP_NODES = 2000, 5, 16


def write_store(folder: Path, texts: Sequence[Int32], model: CorpusModel) -> Segment:
    """A store of these texts in a folder."""
    with model.settings(Limits()) as settings:
        fingerprint = settings.fingerprint
    segment = build_segment(
        list(texts),
        tokenizer_hash=fingerprint.tokenizer_hash,
        model_hash=fingerprint.model_hash,
        vocab_size=fingerprint.vocab_size,
    )
    DirectoryStore(folder).put(NAMESPACE, segment)
    return segment


def record(job: BenchJob, file: Path, console: Console) -> None:
    """Keep the target's answers to a job's prompts."""
    asyncio.run(
        measured_runs(
            replace(job, record=file, rows=(Setting(TARGET_ONLY, ()),)),
            ENGINE_SETTINGS | {"model": "demo", "drafters": ()},
            console,
        )
    )


def counts_of_stores(
    job: BenchJob, stores: Mapping[str, Path], console: Console
) -> dict[str, Float64]:
    """float64 [prompts, 2], committed tokens and steps, of each store by its name; with CORE before
    it, `+core`; and of CORE alone, `core`. `job` replays a recording.
    """
    found: dict[str, Float64] = {}
    for names in _batches(list(stores)):
        drafters = [
            DrafterConfig(
                kind="retrieval", name=name, max_nodes=TREE_NODES, store=str(stores[name])
            )
            for name in names
        ]
        settings = [Setting(TARGET_ONLY, ()), Setting("core", ("core",))]
        for name in names:
            settings += [Setting(name, (name,)), Setting(f"{name}+core", ("core", name))]
        engine: dict[str, Any] = ENGINE_SETTINGS | {"model": "demo", "drafters": (CORE, *drafters)}
        asked = replace(job, rows=tuple(settings))
        runs = asyncio.run(measured_runs(asked, engine, console)).runs
        for name in runs.keys() - {TARGET_ONLY}:
            counts = counts_of(runs[name])
            assert counts is not None
            found[name] = counts
    return found


def lookup_us(segment: Segment, contexts: Sequence[Int32]) -> float:
    """Median over contexts of the microseconds that one lookup takes."""
    lookup = SegmentLookup({SHARED: [segment]})
    taken = []
    for context in contexts:
        best = float("inf")
        for _ in range(NUM_TIMES):
            start = time.perf_counter()
            lookup.lookup([context], [SHARED], [LOOKUP_NODES])
            best = min(best, time.perf_counter() - start)
        taken.append(best)
    return 1e6 * float(np.median(taken))


def contexts_of(texts: Sequence[Sequence[int]]) -> list[Int32]:
    """Ends of contexts as a request would look them up, of recorded texts."""
    ends = [
        np.array(text[end - MAX_CONTEXT : end], dtype=np.int32)
        for text in texts
        for end in range(MAX_CONTEXT, len(text))
    ]
    return ends[:: max(1, len(ends) // NUM_CONTEXTS)]


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(names), BATCH):
        yield names[first : first + BATCH]
