"""What it takes to encode and decode the messages between coordinator and stages.

Run `python -m draftline.benchmarks.transport.stage_messages`. Steps with trees and their answers as
`cluster/transport/messages.py` sends them, and as pickle would, in turns. Prints a table and writes
`benchmarks/results/stage_messages-<date>.json`. Needs no Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...cluster.transport.messages import decode_result, decode_step, encode_result, encode_step
from ...core.steps import SamplingRows, StepInput, StepOutput, TreeRows
from ...measure.records.record import machine

RESULTS = Path(__file__).parents[1] / "results"
# Rows of a step, and requests with a tree each.
SIZES = ((1, 1), (25, 1), (200, 8), (512, 16))
ROUNDS = 20
TIMES = 100


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """Medians over rounds; `ratio` of encoding and decoding to pickle's, within each round."""

    message: str
    num_rows: int
    num_trees: int
    num_bytes: int
    encode_us: float
    decode_us: float
    pickle_us: float
    ratio: float


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    times: list[MessageTimes] = []
    for num_rows, num_trees in SIZES:
        step = build_step(num_rows, num_trees)
        output = StepOutput(0, step.token_ids, step.moves, step.sampling.temperature)
        size = (num_rows, num_trees)
        step_data, answer_data = encode_step(0, step), encode_result(0, output)
        times += [
            _measure(("step", *size), step, len(step_data), rounds,
                     lambda step=step: encode_step(0, step),
                     lambda data=step_data: decode_step(data)),
            _measure(("answer", *size), output, len(answer_data), rounds,
                     lambda output=output: encode_result(0, output),
                     lambda data=answer_data: decode_result(data)),
        ]  # fmt: skip
    for row in times:
        print("  ".join(f"{name} {value}" for name, value in asdict(row).items()))
    _write(times)


def build_step(num_rows: int, num_trees: int) -> StepInput:
    """A step of `num_trees` requests, each a tree behind 1,000 tokens."""
    rows = np.arange(num_rows, dtype=np.int32)
    starts = np.linspace(0, num_rows, num_trees + 1).astype(np.int32)
    none = np.empty(0, dtype=np.int32)
    trees = tuple(
        TreeRows(np.ones((end - start, -(-(end - start) // 64)), dtype=np.uint64),
                 rows[start:end], rows[start:end])
        for start, end in pairwise(starts)
    )  # fmt: skip
    return StepInput(
        step_id=0, moves=np.zeros((num_trees, 2), dtype=np.int32), token_ids=rows,
        positions=rows, slots=rows, request_starts=starts,
        context_lens=np.full(num_trees, 1000, dtype=np.int32),
        block_tables=np.zeros((num_trees, 64), dtype=np.int32), trees=trees, logits_rows=rows,
        sampling=SamplingRows.greedy(rows.astype(np.int64)),
        probe_rows=none, probe_top_k=0, scored_rows=none, scored_tokens=none,
    )  # fmt: skip


def _measure(  # noqa: PLR0917 - one message in two encodings
    name: tuple[str, int, int], value: object, num_bytes: int, rounds: int,
    encode: Callable[[], object], decode: Callable[[], object],
) -> MessageTimes:  # fmt: skip
    pickled = pickle.dumps((0, value), protocol=pickle.HIGHEST_PROTOCOL)
    ways = (
        encode,
        decode,
        lambda: pickle.dumps((0, value), protocol=pickle.HIGHEST_PROTOCOL),
        lambda: pickle.loads(pickled),
    )
    # The first round warms caches up.
    us = np.array([[_microseconds(way) for way in ways] for _ in range(rounds + 1)])[1:]
    there_and_back, by_pickle = us[:, :2].sum(axis=1), us[:, 2:].sum(axis=1)
    encode_us, decode_us = (round(float(x), 1) for x in np.median(us[:, :2], axis=0))
    ratio = round(float(np.median(there_and_back / by_pickle)), 2)
    pickle_us = round(float(np.median(by_pickle)), 1)
    return MessageTimes(*name, num_bytes, encode_us, decode_us, pickle_us, ratio)


def _microseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(TIMES):
        work()
    return (time.perf_counter() - start) / TIMES * 1e6


def _write(times: list[MessageTimes]) -> None:
    report = {
        "machine": machine().fields(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "messages": list(map(asdict, times)),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"stage_messages-{datetime.now(UTC):%Y-%m-%d}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
