"""What the target's features take on their way to a head, in process and over gRPC.

The drafter reads one layer of each hidden size and keeps nothing, so that what is left is the way
there. The server is a process of its own on loopback. Run:
`python -m draftline.benchmarks.transport.feature_transport`
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from ...actors.drafter_server import DrafterServer
from ...cluster.drafting.channel import DrafterLimits
from ...cluster.drafting.hub import DrafterHub
from ...cluster.links.features import feature_bytes
from ...cluster.links.grpc_link import GrpcLink
from ...cluster.links.link import DrafterLink, InprocLink
from ...core.proposals import (
    Commit,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    Proposal,
    Query,
    StepCommit,
    chain_proposal,
)

NAME, SERVE = "head", "--serve"
HIDDEN_SIZES = (256, 4096, 8192)
# Rounds of everything in turn, so that what else the machine does meets all alike.
NUM_ROUNDS, NUM_STEPS, NUM_PROMPTS = 7, 150, 3
PROMPT_LEN = 1024
# Tokens that a step commits; as many as a step with some accepted tokens.
COMMIT = np.array([3, 1, 4], dtype=np.int32)
RESULTS = Path(__file__).parents[1] / "results"


class IdleHead:
    """Takes features and lets them go; answers at once with the same chain."""

    memory_bytes = 0
    name = NAME

    def __init__(self, hidden_size: int) -> None:
        self.feature_layers = layers(hidden_size)
        self._proposal = chain_proposal(NAME, np.arange(8, dtype=np.int32))

    def open(self, request: DraftRequest) -> None:
        """Nothing to learn."""

    def observe_features(self, rows: Sequence[FeatureRows]) -> None:
        """Nothing to keep."""

    def observe(self, commits: Sequence[Commit]) -> None:
        """Nothing to learn."""

    def close(self, request_id: str) -> None:
        """Nothing to forget."""

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        """The same chain for every query."""
        del deadline
        return [self._proposal] * len(queries)


def layers(hidden_size: int) -> FeatureLayers:
    """The last layer's states."""
    return FeatureLayers((31,), hidden_size)


@asynccontextmanager
async def serving(hidden_size: int) -> AsyncIterator[DrafterLink]:
    """A link to a server in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "draftline.benchmarks.transport.feature_transport"),
        *(SERVE, str(hidden_size)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        yield GrpcLink(NAME, f"127.0.0.1:{port}", features=layers(hidden_size))
    finally:
        process.terminate()
        await process.wait()


async def serve(hidden_size: int) -> None:
    """Be that process."""
    server = DrafterServer(IdleHead(hidden_size))
    print(await server.start(), flush=True)
    await asyncio.Event().wait()


class Feeder:
    """One hub, which is handed out states as the engine would."""

    def __init__(self, link: DrafterLink, hidden_size: int) -> None:
        limits = DrafterLimits(vocab_size=4096, answer_timeout_s=60.0)
        self.hub = DrafterHub([link], limits, budget_s=60.0)
        rng = np.random.default_rng(1)
        # Pages that nobody has touched would be cheaper to read.
        self._states = rng.normal(size=(PROMPT_LEN, hidden_size)).astype(np.float32)
        self._count = 0

    async def steps(self, *, with_features: bool) -> float:
        """Microseconds of an exchange about one request, the median of some."""
        prompt = np.resize(COMMIT, 16)
        request_id = self._open(prompt)
        times = []
        for step in range(NUM_STEPS):
            base = len(prompt) + step * len(COMMIT)
            if with_features:
                rows = FeatureRows(request_id, base - 1, self._states[: len(COMMIT)])
                self.hub.note_features([rows])
            commit = StepCommit(request_id, base, COMMIT)
            times.append(await self._exchange([commit], Query(request_id, base + len(COMMIT), 16)))
        self.hub.close(request_id)
        return float(np.median(times))

    async def prompts(self, *, with_features: bool) -> float:
        """Microseconds of the exchange that opens a prompt of `PROMPT_LEN`."""
        times = []
        for _ in range(NUM_PROMPTS):
            request_id = self._open(np.resize(COMMIT, PROMPT_LEN), at_once=())
            if with_features:
                self.hub.note_features([FeatureRows(request_id, 0, self._states)])
            times.append(await self._exchange([], Query(request_id, PROMPT_LEN, 16)))
            self.hub.close(request_id)
        return float(np.median(times))

    def _open(self, prompt: np.ndarray, at_once: Sequence[str] | None = None) -> str:
        self._count += 1
        request_id = f"request-{self._count}"
        self.hub.open(DraftRequest(request_id, prompt, len(prompt), 0.0, seed=1), at_once)
        return request_id

    async def _exchange(self, commits: Sequence[StepCommit], query: Query) -> float:
        start = time.perf_counter()
        found = await self.hub.exchange(commits, [query])
        assert found[query.request_id], "no answer"
        return (time.perf_counter() - start) * 1e6


async def measure(link: DrafterLink, hidden_size: int) -> dict[str, list[float]]:
    """Microseconds a token that features add, of each round."""
    feeder = Feeder(link, hidden_size)
    await feeder.hub.start()
    found: dict[str, list[float]] = {"step": [], "prompt": []}
    # The first round warms up.
    for number in range(NUM_ROUNDS + 1):
        bare = await feeder.steps(with_features=False)
        step = (await feeder.steps(with_features=True) - bare) / len(COMMIT)
        bare = await feeder.prompts(with_features=False)
        prompt = (await feeder.prompts(with_features=True) - bare) / PROMPT_LEN
        if number:
            found["step"].append(step)
            found["prompt"].append(prompt)
    assert not feeder.hub.stats()[0].errors
    await feeder.hub.stop()
    return found


async def run() -> list[dict[str, object]]:
    """All rows of the table."""
    rows: list[dict[str, object]] = []
    for hidden_size in HIDDEN_SIZES:
        sent = feature_bytes([FeatureRows("", 0, np.zeros((1, hidden_size), dtype=np.float32))])
        async with serving(hidden_size) as far:
            near = InprocLink(IdleHead(hidden_size))
            for transport, link in (("inproc", near), ("grpc", far)):
                row = {"transport": transport, "hidden_size": hidden_size}
                row["bytes"] = sent if transport == "grpc" else 0
                for name, times in (await measure(link, hidden_size)).items():
                    low, median, high = np.percentile(times, [0, 50, 100]).tolist()
                    row[name] = {"least": low, "median": median, "most": high}
                rows.append(row)
    return rows


def main() -> None:
    """Print the table and keep it as JSON."""
    if SERVE in sys.argv:
        asyncio.run(serve(int(sys.argv[-1])))
        return
    rows = asyncio.run(run())
    load = os.getloadavg()[0]
    print(f"features of one layer, us a token: median (least - most of {NUM_ROUNDS} rounds)")
    print(f"{'transport':10}{'hidden':>7}{'bytes':>7}{'in a step of 3':>24}{'in a prompt':>24}")
    for row in rows:
        spreads = "".join(f"{_spread(row[name]):>24}" for name in ("step", "prompt"))
        print(f"{row['transport']:10}{row['hidden_size']:>7}{row['bytes']:>7}{spreads}")
    report = {"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
    report |= {"load": load, "rounds": NUM_ROUNDS, "prompt_tokens": PROMPT_LEN}
    report |= {"unit": "microseconds a token", "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "feature_transport.json").write_text(json.dumps(report, indent=1) + "\n")


def _spread(figures: object) -> str:
    assert isinstance(figures, dict)
    return "{median:.1f} ({least:.1f} - {most:.1f})".format(**figures)


if __name__ == "__main__":
    main()
