"""What it takes to build, encode and decode the messages between coordinator and stages.

Run `python -m draftline.benchmarks.transport.stage_messages`. Decode steps of many requests as the
engine builds them, each sent to two stages: as the difference from the step before, as
`cluster/transport/messages.py` sends them, and whole, as every step is that begins a run of the
stages. Prints a table and writes `benchmarks/results/stage_messages.json`. Needs no Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from ...cluster.transport.messages import StepReader, StepWriter, decode_result, encode_result
from ...core.difference.load_loops import load_loops
from ...core.step.builder import load_kernels
from ...core.steps import StepOutput
from ...measure.records.record import machine
from .decode_load import DecodeLoad, Scenario

T = TypeVar("T")

RESULTS = Path(__file__).parents[1] / "results"
SHORT, LONG = 1 << 10, 1 << 17
SCENARIOS = (
    Scenario(1, 60, SHORT),
    Scenario(64, 16, SHORT),
    Scenario(64, 16, LONG),
    Scenario(64, 16, SHORT, penalties=True),
    Scenario(64, 16, LONG, penalties=True),
    Scenario(64, 16, SHORT, grammar=True),
    Scenario(64, 16, LONG, penalties=True, grammar=True),
)
ROUNDS = 20


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """Milliseconds of CPU time, medians over rounds; bytes of the message to either stage.

    sent  as a difference, or whole
    """

    scenario: str
    sent: str
    build_ms: float
    encode_ms: float
    decode_first_ms: float
    decode_last_ms: float
    first_bytes: int
    last_bytes: int


def main() -> None:
    """Measure every scenario."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    load_kernels()
    load_loops()
    times: list[MessageTimes] = []
    for scenario in SCENARIOS:
        times += measure(scenario, rounds)
        for row in times[-2:]:
            print("  ".join(f"{name} {value}" for name, value in asdict(row).items()), flush=True)
    answer_us = _answer_us()
    print(f"an answer of 1088 rows there and back: {answer_us:.0f} us")
    report = {
        "machine": machine().fields(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "answer_us": round(answer_us, 1),
        "steps": list(map(asdict, times)),
    }
    path = RESULTS / "stage_messages.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")


def measure(scenario: Scenario, rounds: int) -> list[MessageTimes]:
    """A scenario's steps as differences; then as many whole, each as the first one of a run.

    Not in turns: messages a hundred times as large would leave the smaller ones' memory cold.
    """
    load = DecodeLoad(scenario)
    link = StepWriter(1), *_readers()
    # The first rounds send everything and grow tables.
    differences = [_round(load, link) for _ in range(rounds + 2)]
    whole = [_round(load, (StepWriter(1), *_readers())) for _ in range(rounds + 2)]
    figures = {"difference": differences, "whole": whole}
    return [_medians(scenario, sent, rows[2:]) for sent, rows in figures.items()]


def _round(load: DecodeLoad, link: tuple[StepWriter, StepReader, StepReader]) -> tuple[float, ...]:
    """Figures of one step, in the order of `MessageTimes`."""
    writer, first, last = link
    load.advance()
    build_ms, step = _timed(load.build)
    encode_ms, payloads = _timed(lambda: writer.write(0, step))
    first_ms, _ = _timed(lambda: first.read(payloads.rows))
    last_ms, _ = _timed(lambda: last.read(payloads.whole))
    return build_ms, encode_ms, first_ms, last_ms, len(payloads.rows), len(payloads.whole)


def _medians(scenario: Scenario, sent: str, rows: list[tuple[float, ...]]) -> MessageTimes:
    *ms, first_bytes, last_bytes = np.median(rows, axis=0).tolist()
    build, encode, first, last = (round(value, 3) for value in ms)
    sizes = int(first_bytes), int(last_bytes)
    return MessageTimes(scenario.name, sent, build, encode, first, last, *sizes)


def _readers() -> tuple[StepReader, StepReader]:
    """Of the first stage, and of the last."""
    return StepReader(is_last=False), StepReader(is_last=True)


def _answer_us() -> float:
    """Microseconds of the answer to 64 trees of 16 nodes, encoded and decoded."""
    tokens = np.arange(64 * 17, dtype=np.int32)
    none = np.empty((0, 0), dtype=np.int32)
    output = StepOutput(0, tokens, none, np.empty(0, dtype=np.float32))
    times = [_timed(lambda: decode_result(encode_result(0, output)))[0] for _ in range(200)]
    return 1e3 * float(np.median(times))


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    """Milliseconds of this thread on a core, whoever else is there; and the result."""
    start = time.thread_time()
    result = work()
    return (time.thread_time() - start) * 1e3, result


if __name__ == "__main__":
    main()
