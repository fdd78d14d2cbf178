"""What a retrieval store costs: to build, to hold, to load and to ask.

    python -m draftline.benchmarks.retrieval.store --tokens 50000000 --arctic FOLDER/bin/python

Text is every source that training may read, among synthetic Zipf-Markov documents; contexts are out
of text that is not stored. Beside the store, arctic-inference's suffix tree and draftline on the
first million tokens. A lookup's time is the wall clock's, with whatever else the machine does.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ...actors.retrieval_server import RetrievalServer
from ...cluster.retrieval import GrpcLookup
from ...core.arrays import Float64, Int32
from ...core.compiled import compiled
from ...core.interfaces import Lookup
from ...measure.records.record import machine
from ...models.load.bundled import demo_path
from ...models.text.tokenizer import load_tokenizer
from ...retrieval_store.directory_store.store import DirectoryStore
from ...retrieval_store.search.lookup import SHARED, SegmentLookup
from ...retrieval_store.segment.segment import Segment, build_segment
from ...training.corpus import SourceFile, held_out_files, training_files


@contextmanager
def served(lookup: Lookup) -> Iterator[str]:
    """The address of a server in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(_started(lookup), loop).result()
    yield f"127.0.0.1:{server[1]}"
    asyncio.run_coroutine_threadsafe(server[0].stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def _started(lookup: Lookup) -> tuple[RetrievalServer, int]:
    server = RetrievalServer(lookup)
    return server, await server.start()


# Synthetic tokens; sources have the demo model's, which are fewer.
VOCAB_SIZE = 50_000
ZIPF_EXPONENT = 1.05
# A pair of tokens is followed by one of these, the k-th with probability 2**-(k + 1), and in one
# of 16 cases by any token.
BRANCHES = 8
NOISE = 1 / 16
DOCUMENT_LEN = 1000
CONTEXT_LEN = 16


@dataclass(frozen=True, slots=True, eq=False)
class StoreText:
    """Documents of int32 token ids, and contexts int32 [n, 16] out of text that is not stored."""

    documents: list[Int32]
    contexts: Int32


def store_text(num_tokens: int, num_contexts: int) -> StoreText:
    """About `num_tokens` of documents, shuffled: every source there is, and synthetic ones.

    Half of the contexts are out of held-out sources, half out of synthetic text. The same on every
    call on one machine.
    """
    rng = np.random.default_rng(0)
    sources, total = [], 0
    for document in _tokenized(training_files(more=True)):
        if total + len(document) > num_tokens // 2:
            break
        sources.append(document)
        total += len(document)
    synthetic = zipf_markov(num_tokens - total, rng)
    documents = [*sources, *_cut(synthetic, rng)]
    order = rng.permutation(len(documents))
    held_out = np.concatenate(_tokenized(held_out_files()))
    texts = (held_out, zipf_markov(max(10 * CONTEXT_LEN, num_contexts), rng))
    contexts = [_windows(text, num_contexts // 2, rng) for text in texts]
    return StoreText([documents[index] for index in order], np.concatenate(contexts))


def zipf_markov(count: int, rng: np.random.Generator) -> Int32:
    """`count` tokens: each pair of tokens has a few top next tokens of its own, drawn by Zipf's
    distribution.
    """
    weights = np.arange(1, VOCAB_SIZE + 1) ** -ZIPF_EXPONENT
    levels = np.cumsum(weights) / weights.sum()
    # The top next tokens of a pair are looked up by a hash of it in this table of drawn tokens.
    table = np.searchsorted(levels, rng.random(2**20)).astype(np.int32)
    return _walk(table, rng.random(count))


def _tokenized(files: list[SourceFile]) -> list[Int32]:
    tokenizer = load_tokenizer(demo_path("demo"))
    texts = [file.text for file in files]
    return [np.array(ids, dtype=np.int32) for ids in tokenizer(texts, verbose=False)["input_ids"]]


def _cut(text: Int32, rng: np.random.Generator) -> list[Int32]:
    lengths = rng.geometric(1 / DOCUMENT_LEN, 2 * len(text) // DOCUMENT_LEN + 1)
    ends = np.cumsum(lengths)
    return [part for part in np.split(text, ends[ends < len(text)]) if len(part)]


def _windows(text: Int32, count: int, rng: np.random.Generator) -> Int32:
    starts = rng.integers(0, len(text) - CONTEXT_LEN, count)
    return text[starts[:, None] + np.arange(CONTEXT_LEN)]


@compiled
def _walk(table: Int32, uniforms: Float64) -> NDArray[np.int32]:
    text = np.empty(len(uniforms), dtype=np.int32)
    before, last = np.int64(0), np.int64(0)
    for place in range(len(uniforms)):
        uniform = uniforms[place]
        if uniform < NOISE:
            found = np.int64(uniform / NOISE * len(table))
        else:
            rest = (uniform - NOISE) / (1 - NOISE)
            branch = min(np.int64(-np.log2(1 - rest)), BRANCHES - 1)
            found = before * 1_000_003 + last * 7_919 + branch * 104_729
        token = table[found % len(table)]
        before, last = last, np.int64(token)
        text[place] = token
    return text


RESULTS = Path(__file__).parents[1] / "results" / "store.json"
WORKER = Path(__file__).with_name("arctic_worker.py")
MAX_NODES = 64
NUM_CONTEXTS = 4000
BATCH = 32
PEER_TOKENS = 1_000_000
HOW_TO = (
    "arctic-inference is left out. To compare: python -m venv FOLDER; "
    "FOLDER/bin/pip install --no-deps arctic-inference numpy; then --arctic FOLDER/bin/python"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTimes:
    """One store.

    build_us           microseconds a token to build, in memory
    peak_bytes         memory a token that building took beside its documents; None: not known
    bytes_per_token    on disk, mapped as it is; for a tree by its own estimate
    load_s             seconds to open the file, check it, and answer once; None: not kept in files
    p50_us, p99_us     microseconds of a lookup of 16 tokens and at most 64 nodes
    best_p50_us, best_p99_us  the same of each context's quickest of three lookups
    """

    name: str
    tokens: int
    build_us: float
    peak_bytes: float | None
    bytes_per_token: float
    load_s: float | None
    p50_us: float
    p99_us: float
    best_p50_us: float
    best_p99_us: float


def lookup_micros(lookup: Lookup, contexts: Int32, batch: int = 1) -> list[float]:
    """Wall-clock microseconds of each call for `batch` contexts."""
    names, budgets = [SHARED] * batch, [MAX_NODES] * batch
    found = []
    for start in range(0, len(contexts) - batch + 1, batch):
        asked = list(contexts[start : start + batch])
        begin = time.perf_counter()
        lookup.lookup(asked, names, budgets)
        found.append(1e6 * (time.perf_counter() - begin))
    return found


def quantiles(micros: Sequence[float]) -> tuple[float, float]:
    """p50 and p99."""
    p50, p99 = np.quantile(micros, [0.5, 0.99])
    return float(p50), float(p99)


def lookup_figures(runs: list[list[float]]) -> dict[str, float]:
    """Quantiles of the first run over all contexts, and of each context's quickest lookup."""
    p50, p99 = quantiles(runs[0])
    best_p50, best_p99 = quantiles(np.min(runs, axis=0).tolist())
    return {"p50_us": p50, "p99_us": p99, "best_p50_us": best_p50, "best_p99_us": best_p99}


def measure(name: str, documents: list[Int32], contexts: Int32, folder: Path) -> StoreTimes:
    """Build a store of one segment in `folder`, load it and ask it."""
    tokens = sum(map(len, documents))
    before = restart_peak()
    begin = time.perf_counter()
    segment = _build(documents)
    build_s = time.perf_counter() - begin
    peak = peak_bytes() - before
    segment_id = DirectoryStore(folder).put(SHARED, segment)
    size = len(segment.data)
    del segment
    begin = time.perf_counter()
    lookup = _opened(folder, segment_id)
    lookup.lookup([contexts[0]], [SHARED], [MAX_NODES])
    load_s = time.perf_counter() - begin
    lookup_micros(lookup, contexts)
    runs = [lookup_micros(lookup, contexts) for _ in range(3)]
    return StoreTimes(
        name=name, tokens=tokens, build_us=1e6 * build_s / tokens, peak_bytes=peak / tokens,
        bytes_per_token=size / tokens, load_s=load_s, **lookup_figures(runs),
    )  # fmt: skip


def measure_arctic(python: Path, documents: list[Int32], contexts: Int32) -> StoreTimes:
    """The same of arctic-inference's suffix tree, in a process of its own."""
    tokens = sum(map(len, documents))
    with tempfile.TemporaryDirectory() as folder:
        names = [str(Path(folder) / name) for name in ("tokens.npy", "ends.npy", "contexts.npy")]
        ends = np.cumsum([len(document) for document in documents])
        for name, array in zip(names, (np.concatenate(documents), ends, contexts), strict=True):
            np.save(name, array)
        command = [str(python), str(WORKER), *names, str(MAX_NODES)]
        answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return StoreTimes(
        name="arctic-inference", tokens=tokens, build_us=1e6 * answer["seconds"] / tokens,
        peak_bytes=None, bytes_per_token=answer["bytes"] / tokens, load_s=None,
        **lookup_figures(answer["micros"]),
    )  # fmt: skip


def measure_grpc(folder: Path, contexts: Int32) -> dict[str, float]:
    """Microseconds of calls for 1 and for 32 contexts, from a client in another thread."""
    (segment_id,) = DirectoryStore(folder).manifest().segment_ids(SHARED)
    found = {}
    with served(_opened(folder, segment_id)) as address:
        client = GrpcLookup(address, timeout_s=30)
        for batch in (1, BATCH):
            lookup_micros(client, contexts[:BATCH], batch)
            p50, p99 = quantiles(lookup_micros(client, contexts, batch))
            found |= {f"batch_{batch}_p50_us": p50, f"batch_{batch}_p99_us": p99}
        client.close()
    return found


def _build(documents: Sequence[Int32]) -> Segment:
    return build_segment(documents, tokenizer_hash="", model_hash="", vocab_size=VOCAB_SIZE)


def _opened(folder: Path, segment_id: str) -> SegmentLookup:
    return SegmentLookup({SHARED: [DirectoryStore(folder).get(SHARED, segment_id)]})


def _first(documents: list[Int32], tokens: int) -> list[Int32]:
    found, left = [], tokens
    for document in documents:
        if left <= 0:
            break
        found.append(document[:left])
        left -= len(document)
    return found


def _table(rows: Sequence[StoreTimes]) -> Table:
    columns: dict[str, Callable[[StoreTimes], object]] = {
        "store": lambda one: one.name,
        "tokens": lambda one: f"{one.tokens:,}",
        "build µs/token": lambda one: f"{one.build_us:.2f}",
        "peak B/token": lambda one: _number(one.peak_bytes, 0),
        "B/token": lambda one: f"{one.bytes_per_token:.1f}",
        "load s": lambda one: _number(one.load_s, 2),
        "lookup p50 µs": lambda one: f"{one.p50_us:.0f}",
        "p99": lambda one: f"{one.p99_us:.0f}",
        "best of 3 p50": lambda one: f"{one.best_p50_us:.0f}",
        "its p99": lambda one: f"{one.best_p99_us:.0f}",
    }
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*(str(column(row)) for column in columns.values()))
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def restart_peak() -> int:
    """Forget the process' highest use of memory so far; what is in use, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _bytes_of("VmRSS")


def peak_bytes() -> int:
    """The highest use of memory since `restart_peak`, in bytes."""
    return _bytes_of("VmHWM")


def _bytes_of(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def main(
    tokens: Annotated[int, typer.Option(min=PEER_TOKENS, help="Tokens to store.")] = 50_000_000,
    arctic: Annotated[Path | None, typer.Option(help="A Python with arctic-inference.")] = None,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = RESULTS,
) -> None:
    """Measure the store, and its peer."""
    console = Console(highlight=False, width=160)
    text = store_text(tokens, NUM_CONTEXTS)
    first = _first(text.documents, PEER_TOKENS)
    # Compiles, so that no figure has it.
    SegmentLookup({SHARED: [_build(first[:2])]}).lookup([text.contexts[0]], [SHARED], [MAX_NODES])
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as large:
        rows = [measure("draftline", first, text.contexts, Path(small))]
        if arctic is not None:
            rows.append(measure_arctic(arctic, first, text.contexts))
        rows.append(measure("draftline", text.documents, text.contexts, Path(large)))
        grpc_micros = measure_grpc(Path(large), text.contexts)
    console.print(machine().line())
    console.print(_table(rows))
    line = ", ".join(f"{name} {value:.0f}" for name, value in grpc_micros.items())
    console.print(f"over gRPC, {tokens:,} tokens: {line}")
    if arctic is None:
        console.print(HOW_TO)
    content = {
        "machine": machine().fields(),
        "context": CONTEXT_LEN,
        "max_nodes": MAX_NODES,
        "stores": list(map(asdict, rows)),
        "grpc": grpc_micros,
    }
    output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
