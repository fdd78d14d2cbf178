"""How live learning raises tau when the same kind of request comes again and again.

    python -m draftline.benchmarks.retrieval.live_learning

Two engines, each with a retrieval replica of its own over one redis-server, answer requests in
turn: the prompts of an agent that repeats a few tasks under other names. The same requests are
answered by two more engines that learn nothing. Both read the bundled corpus as `shared`. Needs
redis-server and matplotlib.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console

from ...cluster.config import DrafterConfig, EngineConfig
from ...cluster.retrieval.source import model_fingerprint
from ...core.interfaces import Ended
from ...core.request.output import RequestOutput
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...deploy.engine.engine import Engine
from ...measure.records.record import machine
from ...retrieval_store.serving.open_store import open_learning, open_store
from ...retrieval_store.serving.service import RetrievalService

RESULTS = Path(__file__).parents[1] / "results" / "live_learning.json"
PARAMS = SamplingParams(max_tokens=48, temperature=0.0)
NAMESPACE = "agent"
WINDOW = 8
NUM_SEEN = 20
NAMES = ("Job", "Task", "Event", "Message", "Ticket", "Order", "Packet", "Record")
TASKS = (
    'class {name}Queue:\n    """A queue of {lower}s."""\n\n    def __init__(self, maxsize=0):\n',
    "def read_{lower}s(path):\n    with open(path) as file:\n        for line in file:\n",
    "class {name}Error(Exception):\n    def __init__(self, {lower}, message):\n        self.",
    "    def test_{lower}(self):\n        with self.assertRaises(TypeError):\n            {name}(",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """tau of each request, in the order in which they came, and who answered them."""

    learning: bool
    taus: tuple[float, ...]
    replicas: tuple[int, ...]

    def mean(self, part: slice) -> float:
        """Mean tau of some requests."""
        return statistics.fmean(self.taus[part])


def main(
    *,
    requests: Annotated[int, typer.Option(help="Requests of each pair of engines.")] = 64,
    pause: Annotated[float, typer.Option(help="Seconds from an answer to the next request.")] = 0.5,
    output: Annotated[Path, typer.Option(help="JSON; the PNG goes beside it.")] = RESULTS,
) -> None:
    """Answer all requests with and without learning; the texts must be equal."""
    torch.set_num_threads(1)
    prompts = _prompts(requests)
    with _redis() as url:
        _copy_corpus(url)
        plain, answers = _run(url, prompts, learning=False, pause=0.0)
        learned, same = _run(url, prompts, learning=True, pause=pause)
        seen = _seconds_until_seen(url)
    if [one.token_ids for one in answers] != [one.token_ids for one in same]:
        raise SystemExit("the answers differ")
    curves = (learned, plain)
    _draw(curves, output.with_suffix(".png"))
    content = {
        "machine": machine().fields(),
        "pause_s": pause,
        "seen_by_the_other_replica_s": seen,
        "curves": [asdict(curve) for curve in curves],
    }
    output.write_text(json.dumps(content, indent=1) + "\n")
    _print(curves, seen)


def _prompts(count: int) -> list[str]:
    """Task and name change with every request; after `len(TASKS) * len(NAMES)` all come again."""
    pairs = [
        (TASKS[index % len(TASKS)], NAMES[index // len(TASKS) % len(NAMES)])
        for index in range(count)
    ]
    return [task.format(name=name, lower=name.lower()) for task, name in pairs]


@contextmanager
def _redis() -> Iterator[str]:
    """A redis-server on a free port that keeps its data in memory only."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        command = ["redis-server", "--bind", "127.0.0.1", "--port", port, "--save", ""]
        command += ["--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            if not any("Ready to accept connections" in line for line in server.stdout):
                raise SystemExit("redis-server did not start")
            yield f"redis://127.0.0.1:{port}/0"
            server.terminate()
            server.stdout.read()


def _copy_corpus(url: str) -> None:
    bundled, store = open_store("demo"), open_store(url)
    for segment_id in bundled.manifest().segment_ids("shared"):
        store.put("shared", bundled.get("shared", segment_id))
    store.close()


def _run(
    url: str, prompts: Sequence[str], *, learning: bool, pause: float
) -> tuple[Curve, list[RequestOutput]]:
    drafter = DrafterConfig(kind="retrieval", store=url, learn=learning)
    config = EngineConfig(model="demo", drafters=[drafter], node_budget="full")
    options = RequestOptions(namespace=NAMESPACE)
    answers: list[RequestOutput] = []
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(config)) for _ in range(2)]
        for index, prompt in enumerate(prompts):
            answers += engines[_replica(index)].generate([prompt], PARAMS, options)
            time.sleep(pause)
    taus = tuple(answer.metrics.acceptance_length for answer in answers)
    replicas = tuple(map(_replica, range(len(prompts))))
    return Curve(learning=learning, taus=taus, replicas=replicas), answers


def _replica(index: int) -> int:
    """In turn, so that a task goes to the other one when it comes again, changed or the same."""
    rounds = index // len(TASKS)
    return (index + rounds + rounds // len(NAMES)) % 2


def _seconds_until_seen(url: str) -> list[float]:
    """From the end of a request at one replica to the first lookup of another that finds it."""
    fingerprint = model_fingerprint("demo")
    one, two = (
        RetrievalService(open_store(url), learning=open_learning(url, fingerprint))
        for _ in range(2)
    )
    two.refresh()
    two.start()
    found: list[float] = []
    rng = np.random.default_rng(0)
    for _ in range(NUM_SEEN):
        tokens = rng.integers(0, fingerprint.vocab_size, 12).astype(np.int32)
        begin = time.perf_counter()
        one.learn(Ended("seen", tokens))
        while two.lookup([tokens[:8]], ["seen"], [1])[0].match_len < 8:
            time.sleep(0.005)
        found.append(time.perf_counter() - begin)
    one.stop()
    two.stop()
    return found


def _draw(curves: Sequence[Curve], png: Path) -> None:
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for curve, colour in zip(curves, ("#0072B2", "#D55E00"), strict=True):
        places = np.arange(1, len(curve.taus) + 1)
        means = [
            statistics.fmean(curve.taus[max(0, end - WINDOW) : end])
            for end in range(1, len(curve.taus) + 1)
        ]
        name = "learning" if curve.learning else "no learning"
        axes.plot(places, means, color=colour, label=f"{name}, mean of the last {WINDOW}")
        for replica, marker in enumerate("ox"):
            own = np.array(curve.replicas) == replica
            axes.scatter(
                places[own],
                np.array(curve.taus)[own],
                color=colour,
                marker=marker,
                s=16,
                alpha=0.5,
                label=f"{name}, a request of replica {replica + 1}",
            )
    axes.set_xlabel("request")
    axes.set_ylabel("tau (tokens a verification step)")
    axes.set_ylim(bottom=0)
    axes.set_title("Repeated requests, two replicas over one Redis, retrieval only, demo model")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(png, dpi=140)


def _print(curves: Sequence[Curve], seen: Sequence[float]) -> None:
    console = Console(width=100, highlight=False)
    for curve in curves:
        quarter = max(len(curve.taus) // 4, 1)
        parts = [slice(0, quarter), slice(quarter, -quarter), slice(-quarter, None)]
        first, middle, last = (curve.mean(part) for part in parts)
        name = "learning" if curve.learning else "no learning"
        console.print(f"{name:12} tau {first:.2f} first quarter, {middle:.2f}, {last:.2f} last")
    middle, worst = statistics.median(seen), max(seen)
    console.print(f"seen by the other replica after {middle:.2f} s (median), {worst:.2f} s at most")
    console.print("texts equal")
    console.print(machine().line())


if __name__ == "__main__":
    typer.run(main)
