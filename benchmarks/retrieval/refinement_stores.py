"""Documents, what stores take of them, and what drafts from these stores bring."""

from __future__ import annotations

import asyncio
import random
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ...cluster.config import DrafterConfig, EngineConfig
from ...core.arrays import Float64, Int32
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...deploy.cli.bench.job import BenchJob
from ...deploy.cli.bench.run import measured_runs
from ...deploy.cli.bench.suites import ENGINE_SETTINGS, GUESS_LEN, TREE_NODES
from ...deploy.cli.corpus.build import CorpusModel, DocumentLimits
from ...deploy.cli.demo.build_store import NAMESPACE, cut
from ...deploy.engine.async_engine import AsyncEngine
from ...measure.clients.endpoint import TARGET_ONLY, Setting
from ...measure.report.summary import counts_of
from ...retrieval_store.corpus.documents import (
    Document,
    DocumentFilter,
    DocumentRules,
    TokenizedDocument,
)
from ...retrieval_store.corpus.refine import Score
from ...retrieval_store.corpus.selection import LOWEST, SELECTIONS, ranking
from ...retrieval_store.directory_store.store import DirectoryStore
from ...retrieval_store.search.lookup import SHARED, SegmentLookup
from ...retrieval_store.segment.segment import MAX_CONTEXT, Segment, build_segment
from ...training.corpus import DEPENDENCIES, MORE_DEPENDENCIES, SourceFile

# Kind -> patterns of its files, below the folder of installed packages.
NEAR = {"python": ("*.py",)}
FAR = {
    "c": ("*.h", "*.c", "*.cpp"),
    "html": ("*.html",),
    "prose": ("METADATA", "*.md", "*.rst"),
    "lists": ("RECORD",),
}
MAX_FILE_BYTES = 200_000
# Of one file; larger ones would be most of a kind.
MAX_DOCUMENTS = 4


def corpus(
    model: CorpusModel, num_tokens: int, far_share: float, *, drops_compressible: bool = True
) -> list[TokenizedDocument]:
    """About `num_tokens`, of which `far_share` (0 to 1) are unlike what the models learned.

    The kinds that are far have equal parts. `drops_compressible`: as `draftline corpus build` does.
    """
    floor = DocumentRules().min_compression_ratio if drops_compressible else 0.0
    sieve = DocumentFilter(DocumentRules(min_compression_ratio=floor))
    parts = {kind: num_tokens * far_share / len(FAR) for kind in FAR}
    parts["python"] = num_tokens * (1 - far_share)
    found: list[TokenizedDocument] = []
    for kind, wanted in parts.items():
        size = 0
        for text in _texts(kind):
            if size >= wanted:
                break
            if sieve.text_fault(text.text) is not None:
                continue
            document = model.tokenize(text)
            if sieve.length_fault(len(document.ids)) is None:
                found.append(document)
                size += len(document.ids)
    return found


def _texts(kind: str) -> Iterator[Document]:
    """Parts of the files of a kind, each file's first ones; in an order of chance."""
    known = {*DEPENDENCIES, *MORE_DEPENDENCIES}
    root = Path(sysconfig.get_paths()["purelib"])
    patterns = {**NEAR, **FAR}[kind]
    paths = sorted(
        path
        for pattern in patterns
        for path in root.rglob(pattern)
        if path.relative_to(root).parts[0] not in known
        and path.is_file()
        and path.stat().st_size <= MAX_FILE_BYTES
    )
    random.Random(0).shuffle(paths)
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield from islice(cut(SourceFile(path.name, text)), MAX_DOCUMENTS)


# Requests at once, and tokens that a text of the target's own begins with.
AT_ONCE, PROMPT_LEN = 16, 16


def scored(
    model: CorpusModel, documents: Sequence[TokenizedDocument]
) -> tuple[list[TokenizedDocument], list[Score]]:
    """The documents, cut to the model's window, and their scores, with `token_probs`."""
    scorer = model.scorer()
    texts = [TokenizedDocument(document.ids[: scorer.windows.size]) for document in documents]
    return texts, scorer.scores(texts, lambda _: None, with_probs=True)


def own_texts(openings: Sequence[Int32], num_tokens: int, job: BenchJob) -> list[Int32]:
    """About `num_tokens` that a job's target says after `openings`, each a text's first tokens."""

    async def generate() -> list[Int32]:
        assert job.model is not None
        config = EngineConfig(model=job.model, max_num_seqs=AT_ONCE)
        texts: list[Int32] = []
        engine = AsyncEngine(config)
        try:
            await engine.start()
            for first in range(0, -(-num_tokens // job.max_tokens), AT_ONCE):
                batch = [opening[:PROMPT_LEN] for opening in openings[first : first + AT_ONCE]]
                params = [
                    SamplingParams(
                        temperature=job.temperature, seed=first + place,
                        max_tokens=job.max_tokens, ignore_eos=True,
                    )
                    for place in range(len(batch))
                ]  # fmt: skip
                outputs = await asyncio.gather(
                    *(
                        engine.generate(ids.tolist(), own, RequestOptions(speculative=False))
                        for ids, own in zip(batch, params, strict=True)
                    )
                )
                texts += [np.array(output.token_ids, dtype=np.int32) for output in outputs]
        finally:
            await engine.close()
        return texts

    return asyncio.run(generate())


@dataclass(frozen=True, slots=True)
class DocumentChoice:
    """The documents of one store; `indices` into those that were scored, `budget` of its tokens."""

    kind: str
    budget: int
    draw: int
    indices: tuple[int, ...]

    @property
    def name(self) -> str:
        """Unique, and safe as a folder."""
        return f"{self.kind}-{self.budget}-{self.draw}"


def choices(
    documents: Sequence[TokenizedDocument],
    scores: Sequence[Score],
    shares: Sequence[float],
    draws: int,
) -> Iterator[DocumentChoice]:
    """The whole corpus; for each share of its tokens what each `--select` takes first, the highest
    perplexities, and random draws, all of as many tokens.

    scores  of the documents, with `token_probs`
    """
    sizes = [len(document.ids) for document in documents]
    ranks = {select: list(ranking(documents, scores, select)) for select in SELECTIONS}
    order = ranks[LOWEST]
    ranks["highest"] = order[::-1]
    yield DocumentChoice("whole", sum(sizes), 0, tuple(order))
    for share in shares:
        budget = round(share * sum(sizes))
        for kind, ranked in ranks.items():
            yield DocumentChoice(kind, budget, 0, _within(ranked, sizes, budget))
        for draw in range(draws):
            drawn = random.Random(draw).sample(order, len(order))
            yield DocumentChoice("random", budget, draw, _within(drawn, sizes, budget))


def _within(order: Iterable[int], sizes: Sequence[int], budget: int) -> tuple[int, ...]:
    """The first ones, until one does not fit."""
    chosen, left = [], budget
    for index in order:
        if sizes[index] > left:
            break
        chosen.append(index)
        left -= sizes[index]
    return tuple(chosen)


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
    with model.settings(DocumentLimits()) as settings:
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
            ENGINE_SETTINGS | {"model": job.model, "drafters": ()},
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
        engine: dict[str, Any] = ENGINE_SETTINGS | {
            "model": job.model, "drafters": (CORE, *drafters)
        }  # fmt: skip
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
