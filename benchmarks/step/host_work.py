"""What a step takes of the engine's own thread outside model and drafters, and what a drafter takes
for all requests of a step: processor time, which other processes change least.

    python -m draftline.benchmarks.step.host_work
    python -m draftline.benchmarks.step.host_work --label new --before old.json

The engine runs over a stage and a drafter that take no time and count: scheduling, merging,
building steps, walking and committing are left. Drafters are the real ones, over sources of this
Python's standard library in the demo model's tokens, 2,000 of them as context; what a drafter asks
of the target is answered with tokens of the texts. Two versions are compared by turns: run the
command in each of both trees; `--before` sets the runs of an older file beside the new one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
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
from ...core.engine import EngineCore
from ...core.errors import DraftlineError
from ...core.interfaces import Drafter
from ...core.kv_cache import BlockPool
from ...core.proposals import (
    Commit,
    DraftCost,
    Drafted,
    DraftRequest,
    FeatureRows,
    Proposal,
    Query,
    StepCommit,
    TopNextTokens,
)
from ...core.request.output import Delta
from ...core.request.request import Request
from ...core.request.sampling_params import SamplingParams
from ...core.request.stop import SilentStream, StopRule
from ...core.scheduler import Scheduler, SchedulerLimits
from ...core.speculation.policy import SpeculationPolicy
from ...core.step.builder import load_kernels
from ...core.steps import StepInput, StepOutput
from ...measure.records import machine
from ...models.load.bundled import demo_path
from ...models.text.tokenizer import load_tokenizer
from ...training.corpus import training_files

RESULTS = Path(__file__).parents[1] / "results" / "host_work.json"
VOCAB, BLOCK_SIZE, PROMPT_LEN, TOKENS = 4096, 16, 64, 400
# Nodes on the right path; the rest of a tree is wrong.
NUM_RIGHT = 3
# Those that the default settings, or a goal, name.
DRAFTERS = ("prompt_lookup", "suffix", "spectra")
CONTEXT_LEN, STEP_LEN, MAX_NODES, DRAFT_STEPS = 2000, 3, 16, 60
REQUESTS = (1, 8, 64)


class CountingStage:
    """A pipeline of one stage that answers at once: after token t comes t + 1."""

    max_in_flight = 1

    def submit(self, step: StepInput) -> Awaitable[StepOutput]:
        """The answer, in the loop's next turn."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[StepOutput] = loop.create_future()
        loop.call_soon(answer.set_result, _count_on(step))
        return answer


def _count_on(step: StepInput) -> StepOutput:
    return StepOutput(
        step_id=step.step_id,
        target_tokens=(step.token_ids[step.logits_rows] + 1) % VOCAB,
    )


class CountingDrafters:
    """Costs next to nothing: a chain of right tokens with wrong ones beside it."""

    def __init__(self, num_nodes: int) -> None:
        right = min(NUM_RIGHT, num_nodes)
        offsets = np.r_[1 : right + 1, 100 : 100 + num_nodes - right].astype(np.int32)
        self._after = (np.arange(VOCAB, dtype=np.int32)[:, None] + offsets) % VOCAB
        wrong = np.maximum(ROOT, np.arange(num_nodes - right) // 4 - 1)
        self._parents = np.r_[ROOT : right - 1, wrong].astype(np.int32)
        self._log_probs = np.zeros(num_nodes, dtype=np.float32)
        self._last: dict[str, int] = {}

    def open(self, request: DraftRequest, at_once: Collection[str] | None = None) -> None:  # noqa: ARG002
        """Begin a request."""
        self._last[request.request_id] = int(request.token_ids[-1])

    def close(self, request_id: str, last: Sequence[StepCommit] = ()) -> None:  # noqa: ARG002
        """End a request."""
        del self._last[request_id]

    async def exchange(
        self,
        commits: Sequence[StepCommit],
        queries: Sequence[Query],
        asked: Mapping[str, Collection[str]] | None = None,  # noqa: ARG002
    ) -> Mapping[str, Sequence[Proposal]]:
        """A tree for every query."""
        for commit in commits:
            self._last[commit.request_id] = int(commit.tokens[-1])
        return {query.request_id: [self._tree(query.request_id)] for query in queries}

    def costs(self) -> Mapping[str, DraftCost]:
        """They cost next to nothing."""
        return {"counting": DraftCost()}

    feature_drafters: frozenset[str] = frozenset()

    def note_features(self, rows: Sequence[FeatureRows]) -> None:
        """Nobody asked for any."""
        assert not rows

    remote: frozenset[str] = frozenset()

    stage_heads: tuple[str, ...] = ()

    def note_drafted(self, drafted: Sequence[Drafted]) -> None:
        """Nobody drafts there."""
        assert not drafted

    def _tree(self, request_id: str) -> Proposal:
        tokens = self._after[self._last[request_id]]
        return Proposal("counting", tokens, self._parents, self._log_probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """`requests` requests at once, each with trees of `nodes` nodes."""

    requests: int
    nodes: int


HOST = (
    HostLoad(requests=1, nodes=60),
    HostLoad(requests=8, nodes=16),
    HostLoad(requests=64, nodes=16),
    HostLoad(requests=256, nodes=4),
)


class Bench:
    """An engine over that stage with a load that decodes."""

    def __init__(self, load: HostLoad, tokens: int) -> None:
        self.pipeline = CountingStage()
        slots = PROMPT_LEN + tokens + load.nodes + 2 * BLOCK_SIZE
        pool = BlockPool((load.requests + 1) * -(-slots // BLOCK_SIZE), BLOCK_SIZE)
        limits = SchedulerLimits(
            max_running=load.requests + 1,
            max_waiting=0,
            max_step_rows=max(512, load.requests * (load.nodes + 1)),
            max_tree_nodes=load.nodes,
            max_probe_rows=0,
            num_groups=1,
        )
        drafters, scheduler = CountingDrafters(load.nodes), Scheduler(pool, limits)
        budget = SpeculationPolicy(is_adaptive=False)
        self.core = EngineCore(self.pipeline, drafters, scheduler, budget, time.monotonic)
        self.waiting = {f"request-{index}" for index in range(load.requests)}
        self.has_finished = False
        for index, name in enumerate(sorted(self.waiting)):
            self._add(name, index, tokens)

    def _add(self, name: str, first: int, tokens: int) -> None:
        """Queue a request whose prompt counts from `first`."""
        params = SamplingParams(max_tokens=tokens, temperature=0.0)
        prompt = np.arange(first, first + PROMPT_LEN, dtype=np.int32)
        request = Request(name, prompt, params, 0, tokens, self._on_output)
        self.core.add(request, StopRule(params, (), tokens, SilentStream()))

    def _on_output(self, event: Delta | DraftlineError) -> None:
        assert isinstance(event, Delta)
        self.waiting.discard(event.request_id)
        self.has_finished = self.has_finished or event.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Processor time of a step, milliseconds: over all steps of all rounds, and the median of the
    round that was least disturbed."""

    load: str
    p10_ms: float
    p50_ms: float
    quiet_p50_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTime:
    """Processor time of one call for all requests, milliseconds: the least median of all rounds."""

    drafter: str
    requests: int
    propose_ms: float
    observe_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRun:
    """What one call of this command measured."""

    label: str
    machine: str
    host: Sequence[HostTime]
    drafters: Sequence[DraftTime]


async def step_times(load: HostLoad) -> list[float]:
    """Seconds of the thread from one step to the next while all requests of a load decode."""
    bench, seconds = Bench(load, TOKENS), []
    core = bench.core
    while bench.waiting:
        await core.step()
    num_steps, before = core.num_steps, time.thread_time()
    while not bench.has_finished:
        await core.step()
        if core.num_steps > num_steps:
            now = time.thread_time()
            seconds.append(now - before)
            num_steps, before = core.num_steps, now
    while core.has_work:
        await core.step()
    return seconds


def measure_host(rounds: int) -> list[HostTime]:
    """Every load, in turns."""
    found = [[asyncio.run(step_times(load)) for load in HOST] for _ in range(rounds)]
    return list(map(_host_time, HOST, zip(*found, strict=True)))


def _host_time(load: HostLoad, rounds: Sequence[Sequence[float]]) -> HostTime:
    p10_ms, p50_ms = (1e3 * np.quantile(np.concatenate(rounds), [0.1, 0.5])).tolist()
    return HostTime(
        load=f"{load.requests} x {load.nodes}",
        p10_ms=p10_ms,
        p50_ms=p50_ms,
        quiet_p50_ms=1e3 * min(map(statistics.median, rounds)),
    )


def measure_drafters(rounds: int) -> list[DraftTime]:
    """Every drafter for each number of requests, in turns."""
    found = texts(max(REQUESTS), CONTEXT_LEN + (DRAFT_STEPS + 1) * STEP_LEN)
    cells = [(count, name) for count in REQUESTS for name in DRAFTERS]
    runs = [[_draft_times(name, found[:count]) for count, name in cells] for _ in range(rounds)]
    return [
        DraftTime(
            drafter=name, requests=count, propose_ms=min(one[0] for one in own),
            observe_ms=min(one[1] for one in own),
        )
        for (count, name), own in zip(cells, zip(*runs, strict=True), strict=True)
    ]  # fmt: skip


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


def _draft_times(name: str, found: Sequence[Int32]) -> tuple[float, float]:
    """Medians of a draft and of a commit of one drafter, milliseconds, a request for each text."""
    drafter = build_drafter(DrafterConfig(kind=name), EngineConfig(model="demo"))
    for index, text in enumerate(found):
        tokens = text[:CONTEXT_LEN]
        drafter.open(DraftRequest(str(index), tokens, CONTEXT_LEN - 200, 0.0, index))
    drafts, commits = zip(*_draft_steps(drafter, found), strict=True)
    return 1e3 * statistics.median(drafts), 1e3 * statistics.median(commits)


def _draft_steps(drafter: Drafter, found: Sequence[Int32]) -> Iterator[tuple[float, float]]:
    """Seconds of a draft and of a commit, of each step."""
    rng = np.random.default_rng(0)
    for step in range(DRAFT_STEPS):
        base = CONTEXT_LEN + step * STEP_LEN
        queries = [Query(str(index), base, MAX_NODES) for index in range(len(found))]
        begin = time.thread_time()
        proposals = drafter.propose(queries)
        proposed = time.thread_time()
        commits = [
            _commit(str(index), text, base, proposal, rng)
            for index, (text, proposal) in enumerate(zip(found, proposals, strict=True))
        ]
        told = time.thread_time()
        drafter.observe(commits)
        yield proposed - begin, time.thread_time() - told


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


def _table(runs: Sequence[dict[str, Any]]) -> Table:
    """The figures of all runs side by side."""
    table = Table("", *(run["label"] for run in runs), box=None)
    _add_rows(table, runs, "host", ("load",), ("p10_ms", "p50_ms", "quiet_p50_ms"))
    _add_rows(table, runs, "drafters", ("requests", "drafter"), ("propose_ms", "observe_ms"))
    return table


def _add_rows(
    table: Table,
    runs: Sequence[dict[str, Any]],
    kind: str,
    names: Sequence[str],
    figures: Sequence[str],
) -> None:
    for row in runs[-1][kind]:
        name = [row[key] for key in names]
        cells = []
        for run in runs:
            same = [one for one in run[kind] if [one[key] for key in names] == name]
            shown = [f"{same[0][key]:.3f}" for key in figures if key in same[0]] if same else []
            cells.append(" / ".join(shown))
        table.add_row(" ".join(map(str, name)), *cells)


def main(
    rounds: Annotated[int, typer.Option(help="Runs of each load and drafter.")] = 5,
    label: Annotated[str, typer.Option(help="Names this run in the file.")] = "now",
    before: Annotated[
        Path | None, typer.Option(help="File of this command whose runs go first.")
    ] = None,
    host_only: Annotated[bool, typer.Option(help="No drafters.")] = False,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = RESULTS,
) -> None:
    """Measure the host's work."""
    runs: list[dict[str, Any]] = json.loads(before.read_text())["runs"] if before else []
    load_kernels()
    run = HostRun(
        label=label,
        machine=machine().line(),
        host=measure_host(rounds),
        drafters=() if host_only else measure_drafters(rounds),
    )
    runs = [one for one in runs if one["label"] != label] + [asdict(run)]
    console = Console(highlight=False)
    console.print(machine().line())
    console.print(
        "processor time, ms; host: p10 / p50 of a step, p50 of the quietest round; "
        "drafters: draft / commit"
    )
    console.print(_table(runs))
    output.write_text(json.dumps({"rounds": rounds, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
