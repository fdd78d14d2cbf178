"""How long each drafter that needs no training takes for a draft, and to hear of a commit; and how
long a merge of drafts takes.

    python -m draftline.benchmarks.step.draft_time

Texts are sources of this Python's standard library in the demo model's tokens, 2,000 of them as
context, for 1, 8 and 64 requests; then steps of three tokens are committed one after the other.
What a drafter asks of the target is answered with tokens of the texts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ...cluster.config import DrafterConfig, EngineConfig
from ...cluster.drafting.factory import build_drafter
from ...core.arrays import ROOT, Int32
from ...core.interfaces import Drafter
from ...core.proposals import Commit, DraftRequest, Proposal, Query, TopNextTokens
from ...core.step.builder import load_kernels
from ...core.tree.acceptance import AcceptanceTable
from ...core.tree.merge import merge
from ...measure.records.record import machine
from ...models.load.bundled import demo_path
from ...models.text.tokenizer import load_tokenizer
from ...training.corpus import training_files

RESULTS = Path(__file__).parents[1] / "results" / "draft_time.json"
CONTEXT_LEN = 2000
STEP_LEN = 3
MAX_NODES = 16
REQUESTS = (1, 8, 64)
DRAFTERS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {},
    "spectra": {},
    "lookahead": {},
    "anpd": {},
    "suffix": {},
    "token_recycling": {},
    "retrieval": {"store": "demo"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Milliseconds of one call for all requests: medians, and the 90th percentile of drafts."""

    drafter: str
    requests: int
    propose_p50_ms: float
    propose_p90_ms: float
    observe_p50_ms: float
    open_ms: float
    nodes: float


def texts(count: int, length: int) -> list[Int32]:
    """`count` texts of so many tokens."""
    tokenizer = load_tokenizer(demo_path("demo"))
    found: list[Int32] = []
    for file in training_files():
        ids = np.array(tokenizer(file.text, verbose=False)["input_ids"], dtype=np.int32)
        if len(ids) >= length:
            found.append(ids[:length])
            if len(found) == count:
                return found
    raise AssertionError("the corpus has too few files of this length")


def measure(
    name: str,
    found: list[Int32],
    num_steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """One drafter with a request for each text; `clock` gives the seconds that are counted."""
    config = DrafterConfig(kind=name, **DRAFTERS[name])
    drafter = build_drafter(config, EngineConfig(model="demo"))
    rng = np.random.default_rng(0)
    start = clock()
    for index, text in enumerate(found):
        tokens = text[:CONTEXT_LEN]
        drafter.open(DraftRequest(str(index), tokens, CONTEXT_LEN - 200, 0.0, index))
    opened = clock() - start
    steps = list(_steps(drafter, found, num_steps, rng, clock))
    drafts, commits, nodes = zip(*steps, strict=True)
    return Measured(
        drafter=name,
        requests=len(found),
        propose_p50_ms=1e3 * statistics.median(drafts),
        propose_p90_ms=1e3 * float(np.quantile(drafts, 0.9)),
        observe_p50_ms=1e3 * statistics.median(commits),
        open_ms=1e3 * opened / len(found),
        nodes=statistics.mean(nodes),
    )


def measure_merge(count: int) -> float:
    """Microseconds of merging 6 random proposals of 20 nodes into a tree of 60: the median."""
    rng, table = np.random.default_rng(0), AcceptanceTable()
    seconds = []
    for _ in range(count):
        proposals = [_random_proposal(rng, f"drafter-{index}") for index in range(6)]
        begin = time.perf_counter()
        merge(proposals, 60, 60, table)
        seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds)


def _random_proposal(rng: np.random.Generator, name: str) -> Proposal:
    parents = np.array([rng.integers(ROOT, node) for node in range(20)], dtype=np.int32)
    tokens = rng.integers(8, size=20).astype(np.int32)
    return Proposal(name, tokens, parents, np.zeros(20, dtype=np.float32))


def _steps(
    drafter: Drafter,
    found: list[Int32],
    count: int,
    rng: np.random.Generator,
    clock: Callable[[], float],
) -> Iterator[tuple[float, float, float]]:
    """Seconds of a draft and of a commit, and nodes of a request."""
    for step in range(count):
        base = CONTEXT_LEN + step * STEP_LEN
        queries = [Query(str(index), base, MAX_NODES) for index in range(len(found))]
        begin = clock()
        proposals = drafter.propose(queries)
        proposed = clock()
        commits = [
            _commit(str(index), text, base, proposal, rng)
            for index, (text, proposal) in enumerate(zip(found, proposals, strict=True))
        ]
        told = clock()
        drafter.observe(commits)
        heard = clock()
        yield proposed - begin, heard - told, statistics.mean(len(one.tokens) for one in proposals)


def _commit(
    name: str, text: Int32, base: int, proposal: Proposal, rng: np.random.Generator
) -> Commit:
    probe_ids = top_next_tokens = None
    if proposal.probe is not None:
        shape = (len(proposal.probe.wanted), proposal.probe.top_k)
        probe_ids = rng.choice(text, shape)
    if proposal.num_top_next_tokens:
        rows = np.append(text[base - 1], proposal.tokens)
        top_next_tokens = TopNextTokens(
            rows, rng.choice(text, (len(rows), proposal.num_top_next_tokens))
        )
    return Commit(name, base, text[base : base + STEP_LEN], probe_ids, top_next_tokens)


def main(
    steps: Annotated[int, typer.Option(help="Steps of each drafter.")] = 200,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = RESULTS,
) -> None:
    """Measure every drafter."""
    console = Console(highlight=False)
    found = texts(max(REQUESTS), CONTEXT_LEN + (steps + 1) * STEP_LEN)
    results = [measure(name, found[:count], steps) for count in REQUESTS for name in DRAFTERS]
    table = Table(
        "drafter", "requests", "draft p50 ms", "p90", "commit p50 ms", "open ms", "nodes", box=None
    )
    for one in results:
        times = (one.propose_p50_ms, one.propose_p90_ms, one.observe_p50_ms, one.open_ms)
        cells = [f"{value:.3f}" for value in times]
        table.add_row(one.drafter, str(one.requests), *cells, f"{one.nodes:.1f}")
    load_kernels()
    merge_us = measure_merge(1000)
    console.print(machine().line())
    console.print(table)
    console.print(f"merging 6 proposals of 20 nodes into 60 nodes: {merge_us:.0f} us (median)")
    content = {
        "machine": machine().fields(),
        "steps": steps,
        "merge_us": merge_us,
        "drafters": list(map(asdict, results)),
    }
    output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
