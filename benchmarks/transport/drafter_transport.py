"""What asking three drafters costs a step, in process and over gRPC.

Every drafter is prompt lookup over a repeating text, so that the answer is not empty and the
drafter's own time is some microseconds. Each gRPC drafter is a process of its own on loopback.
Run: `python -m draftline.benchmarks.transport.drafter_transport`
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from ...cluster.config import DrafterConfig
from ...cluster.drafting.channel import DrafterLimits
from ...cluster.drafting.factory import build_drafter
from ...cluster.drafting.hub import DrafterHub
from ...cluster.links.grpc_link import GrpcLink
from ...cluster.links.link import DrafterLink, InprocLink
from ...core.proposals import Commit, DraftRequest, Proposal, Query, StepCommit, chain_proposal

NUM_DRAFTERS = 3
NUM_STEPS = 1000
PROMPT_LEN = 128
VOCAB_SIZE = 4096
# Tokens that a step commits; as many as a step with some accepted tokens.
COMMIT = np.array([3, 1, 4], dtype=np.int32)
RESULTS = Path(__file__).parents[1] / "results"


class FixedDrafter:
    """Answers at once with the same chain, so that what is left is the hub's own time."""

    memory_bytes = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self._proposal = chain_proposal(name, np.arange(8, dtype=np.int32))

    def open(self, request: DraftRequest) -> None:
        """Nothing to learn."""

    def observe(self, commits: Sequence[Commit]) -> None:
        """Nothing to learn."""

    def close(self, request_id: str) -> None:
        """Nothing to forget."""

    def propose(self, queries: Sequence[Query], deadline: float | None = None) -> list[Proposal]:
        """The same chain for every query."""
        del deadline
        return [self._proposal] * len(queries)


def config(index: int) -> DrafterConfig:
    """Settings of one drafter."""
    return DrafterConfig.model_validate({"kind": "prompt_lookup", "name": f"lookup{index}"})


async def start_server(index: int) -> tuple[asyncio.subprocess.Process, GrpcLink]:
    """A drafter server process and a link to it."""
    settings = config(index)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "draftline.actors.drafter_server"),
        *("--config", settings.model_dump_json()),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    port = (await process.stdout.readline()).decode().strip().removeprefix("ready port=")
    return process, GrpcLink(settings.source, f"127.0.0.1:{port}")


async def measure(links: Sequence[DrafterLink], num_requests: int) -> dict[str, float]:
    """Microseconds of one exchange: median, 10th and 99th percentile; proposals a step."""
    hub = DrafterHub(links, DrafterLimits(vocab_size=VOCAB_SIZE), budget_s=1.0)
    await hub.start()
    prompt = np.resize(COMMIT, PROMPT_LEN)
    ids = [f"request-{index}" for index in range(num_requests)]
    for request_id in ids:
        hub.open(DraftRequest(request_id, prompt, PROMPT_LEN, 0.0, seed=1))
    times: list[float] = []
    found = 0
    for step in range(NUM_STEPS):
        base = PROMPT_LEN + step * len(COMMIT)
        commits = [StepCommit(request_id, base, COMMIT) for request_id in ids]
        queries = [Query(request_id, base + len(COMMIT), 16) for request_id in ids]
        start = time.perf_counter()
        answers = await hub.exchange(commits, queries)
        times.append((time.perf_counter() - start) * 1e6)
        found += sum(map(len, answers.values()))
    await hub.stop()
    low, median, high = np.percentile(times, [10, 50, 99]).tolist()
    return {"p10": low, "p50": median, "p99": high, "proposals": found / NUM_STEPS}


async def run() -> list[dict[str, object]]:
    """All rows of the table."""
    rows: list[dict[str, object]] = []
    servers = [await start_server(index) for index in range(NUM_DRAFTERS)]
    try:
        for num_requests in (1, 8):
            ways: dict[str, Sequence[DrafterLink]] = {
                "inproc, hub alone": [
                    InprocLink(FixedDrafter(f"fixed{index}")) for index in range(NUM_DRAFTERS)
                ],
                "inproc": [
                    InprocLink(build_drafter(config(index))) for index in range(NUM_DRAFTERS)
                ],
                "grpc": [link for _, link in servers],
            }
            for way, links in ways.items():
                figures = await measure(links, num_requests)
                rows.append({"transport": way, "requests": num_requests, **figures})
    finally:
        for process, _ in servers:
            process.terminate()
            await process.wait()
    return rows


def main() -> None:
    """Print the table and keep it as JSON."""
    rows = asyncio.run(run())
    load = os.getloadavg()[0]
    print(f"one exchange with {NUM_DRAFTERS} drafters, us ({NUM_STEPS} steps; load {load:.1f})")
    print(f"{'transport':20}{'requests':>9}{'p10':>9}{'p50':>9}{'p99':>9}{'proposals':>11}")
    for row in rows:
        figures = "".join(f"{row[name]:>9.0f}" for name in ("p10", "p50", "p99"))
        print(f"{row['transport']:20}{row['requests']:>9}{figures}{row['proposals']:>11.1f}")
    RESULTS.mkdir(exist_ok=True)
    day = datetime.now(UTC).date().isoformat()
    path = RESULTS / f"drafter_transport-{day}.json"
    report = {"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
    report |= {"load": load, "unit": "microseconds", "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
