"""Step traces: files that load at any time, rows that viewers can draw, and what a run did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.cluster.engine.trace_file import TraceFile
from draftline.core.arrays import Span
from draftline.core.errors import ConfigError
from draftline.core.step.trace import TraceEvent
from draftline.deploy.settings.settings import build_serve_args
from support.tools.step_events import Event, read_rows

# Events begin and end at whole microseconds.
ROUNDED = 1e-6
# Writes events for as long as it may.
WRITER = """
import sys, time
from pathlib import Path
from draftline.cluster.engine.trace_file import TraceFile
from draftline.core.step.trace import TraceEvent

file = TraceFile(Path(sys.argv[1]), 10**8, "engine")
row = file.row("host")
for number in range(int(sys.argv[2])):
    file.write([TraceEvent(row, "commit", number, number + 0.5, {"step": number})] * 3)
    time.sleep(float(sys.argv[3]))
"""


def write(path: Path, steps: Sequence[int], max_bytes: int = 100_000) -> None:
    """An event of half a second for each."""
    file = TraceFile(path, max_bytes, "engine")
    row = file.row("host")
    for step in steps:
        file.write([event(row, step)])
    file.close()
    file.write([event(row, 0)])


def event(row: int, step: int) -> TraceEvent:
    return TraceEvent(row, "commit", step, step + 0.5, {"step": step})


def read(path: Path) -> list[dict[str, Any]]:
    """As viewers do, which only forgive an array its missing end."""
    text = path.read_text().rstrip()
    return json.loads(text if text.endswith("]") else text + "]")


def steps_of(path: Path) -> list[int]:
    return [one["args"]["step"] for one in read(path) if one["ph"] == "X"]


def test_events_are_those_of_the_chrome_format(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text("what was here before\n")
    file = TraceFile(path, 100_000, "draftline demo")
    host = file.row("host")
    assert read(path) == []
    file.write([TraceEvent(host, "ask", 3.0, 3.25, {"drafters": {"a": 2}})])
    assert len(read(path)) == len(read_rows(path)["host"]) + 2
    # A row that comes later.
    stage = file.row("stage 0")
    file.write([TraceEvent(stage, "tree", 3.1, 3.2, {})])
    file.close()
    pid = os.getpid()
    assert json.loads(path.read_bytes()) == [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": "draftline demo"}},
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": 1, "args": {"name": "host"}},
        {"name": "ask", "ph": "X", "ts": 3_000_000, "dur": 250_000, "pid": pid, "tid": 1,
         "args": {"drafters": {"a": 2}}},
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": 2, "args": {"name": "stage 0"}},
        {"name": "tree", "ph": "X", "ts": 3_100_000, "dur": 100_000, "pid": pid, "tid": 2,
         "args": {}},
    ]  # fmt: skip
    assert read_rows(path) == {
        "host": [Event("ask", (3.0, 3.25), {"drafters": {"a": 2}})],
        "stage 0": [Event("tree", (3.1, 3.2), {})],
    }


def test_a_full_file_keeps_the_newest_steps(tmp_path: Path) -> None:
    path, older = tmp_path / "steps.json", tmp_path / "steps.json.1"
    write(path, [100])
    names_bytes = path.stat().st_size
    write(path, [100, 101])
    event_bytes = path.stat().st_size - names_bytes
    # All lines are equally long: a part has its names and four events.
    steps = range(100, 110)
    write(path, steps, 2 * (names_bytes + 3 * event_bytes))
    assert json.loads(older.read_bytes()) == read(older)
    assert (steps_of(older), steps_of(path)) == ([*steps[4:8]], [*steps[8:]])
    names = [[one for one in read(part) if one["ph"] == "M"] for part in (older, path)]
    assert names[0] == names[1]
    assert [one["args"]["name"] for one in names[0]] == ["engine", "host"]
    # A start leaves nothing of what was there.
    write(path, [0])
    assert steps_of(path) == [0]
    assert not older.exists()


def test_a_writer_that_is_killed_leaves_a_file_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    arguments = [sys.executable, "-c", WRITER, str(path), "1000000", "0.001"]
    with subprocess.Popen(arguments) as writer:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.stat().st_size > 50_000):
            assert time.monotonic() < deadline
            assert writer.poll() is None
            time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
    steps = steps_of(path)
    # What is written at once is there as a whole, or not at all.
    assert steps == [number for number in range(len(steps) // 3) for _ in range(3)]
    assert len(steps) > 100


def test_a_full_disk_ends_the_trace_and_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
    found = subprocess.run(
        [sys.executable, "-c", limited + WRITER, str(path), "100", "0"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert found.stderr.splitlines() == ["event=trace_ended reason='No space left on device'"]
    steps = [one["args"]["step"] for one in json.loads(path.read_bytes()) if one["ph"] == "X"]
    assert steps == [number for number in range(len(steps) // 3) for _ in range(3)]
    assert 4000 < path.stat().st_size <= 5000


def test_a_part_that_cannot_be_renamed_ends_the_trace_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.json"
    file = TraceFile(path, 1, "engine")
    row = file.row("host")
    file.write([event(row, 0)])
    (tmp_path / "steps.json.1").mkdir()
    file.write([event(row, 1)])
    file.write([event(row, 2)])
    file.close()
    assert caplog.messages == ["event=trace_ended reason='Is a directory'"]
    assert steps_of(path) == [0]


def is_inside(span: Span, other: Span) -> bool:
    return other[0] - ROUNDED <= span[0] and span[1] <= other[1] + ROUNDED


def check_nesting(row: Sequence[Event]) -> None:
    """Viewers draw events of a row that lie apart or one inside the other, and drop the rest."""
    open_ends: list[float] = []
    for one in sorted(row, key=lambda one: (one.span[0], -one.span[1])):
        begin, end = one.span
        assert begin <= end
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


def test_an_engine_traces_every_stage_and_drafter_of_every_step(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "steps.json"
    config = EngineConfig(
        model=str(checkpoint), pipeline_parallel_size=2, kv_cache_tokens=512, trace_steps=path,
        drafters=(DrafterConfig(kind="prompt_lookup"), DrafterConfig(kind="suffix")),
    )  # fmt: skip
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    begin = time.time()
    with Engine(config) as engine:
        outputs = engine.generate(["abcabcabcabc", "xyxyxyxyxy", "ab" * 40], params)
        stats = engine.stats()
    [process] = [one for one in read(path) if one["name"] == "process_name"]
    assert process["args"]["name"] == f"draftline {checkpoint.name}"
    rows = read_rows(path)
    assert [*rows] == ["host", "prompt_lookup", "suffix", "stage 0", "stage 1"]
    for row in rows.values():
        check_nesting(row)
    by_name = {
        name: {one.args["step"]: one for one in rows["host"] if one.name == name}
        for name in ("ask", "build", "commit")
    }
    asks, builds, commits = by_name.values()
    first, last = ({one.args["step"]: one for one in rows[f"stage {index}"]} for index in (0, 1))
    for events in (builds, commits, first, last):
        assert [*events] == list(range(stats.num_steps))
    assert sum(one.args["tokens"] + one.args["first_tokens"] for one in commits.values()) == 36
    drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    assert sum(sum(one.args["nodes"].values()) for one in builds.values()) == drafted
    for step, built in builds.items():
        spans = [built.span, first[step].span, last[step].span, commits[step].span]
        times = [begin, *chain.from_iterable(spans)]
        assert all(later >= earlier - ROUNDED for earlier, later in pairwise(times))
        has_trees, has_prompts = built.args["requests"] > 0, built.args["prompt_rows"] > 0
        kind = "mixed" if has_trees and has_prompts else "tree" if has_trees else "prompt"
        assert first[step].name == last[step].name == kind
        if has_trees:
            assert asks[step].span[1] == built.span[0]
    for name in ("prompt_lookup", "suffix"):
        asked = [one for one in asks.values() if name in one.args["drafters"]]
        assert asked
        drafts = [one for one in rows[name] if one.name == "draft"]
        for ask in asked:
            [draft] = [one for one in drafts if is_inside(one.span, ask.span)]
            assert draft.args["requests"] == ask.args["drafters"][name]


def test_what_cannot_be_traced_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "none" / "steps.json"
    with pytest.raises(ConfigError, match=r"trace_steps: cannot write .*steps\.json"):
        Engine(EngineConfig(model=str(checkpoint), trace_steps=path))
    with pytest.raises(ConfigError, match="trace_steps: one file cannot hold"):
        build_serve_args({"trace_steps": "a.json", "deployment": {"num_replicas": 2}})
