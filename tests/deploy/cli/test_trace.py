"""The trace file from an engine to a table and a picture."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.cluster.engine.trace_file import TraceFile, read_trace
from draftline.core.errors import ConfigError
from draftline.core.step.trace import SliceCounts, StepRecord
from draftline.deploy.cli import main as cli
from draftline.deploy.cli.trace.flights import flight_lanes
from draftline.deploy.cli.trace.summary import kind_of, summarise
from draftline.deploy.settings.settings import build_serve_args
from typer.testing import CliRunner

runner = CliRunner()


def record(step: int, *, prompt_rows: int = 0, requests: int = 1) -> StepRecord:
    """A step every 10 s: planned at 0, two stages of 4 and 2 s, committed at 9."""
    start = 10.0 * step
    return StepRecord(
        step=step, planned_at=start, drafters=("a",), draft_wait_s=1.0,
        submitted_at=start + 2, answered_at=start + 8, committed_at=start + 9,
        rows=prompt_rows + 4 * requests, prompt_rows=prompt_rows, requests=requests,
        tree_nodes=3 * requests, accepted_nodes=requests, tokens=2 * requests, first_tokens=0,
        nodes_by_source={"a": 3 * requests}, accepted_by_source={"a": requests},
        slices=(), stages=((start + 2, start + 6), (start + 6, start + 8)),
    )  # fmt: skip


def write(path: Path, records: list[StepRecord], max_bytes: int = 100_000) -> None:
    file = TraceFile(path, max_bytes)
    for one in records:
        file.write(one)
    file.close()
    file.write(records[0])


def test_summary_by_hand() -> None:
    records = [record(0, prompt_rows=8, requests=0), record(1, prompt_rows=8), record(2)]
    assert [kind_of(one) for one in records] == ["prompt", "mixed", "tree"]
    found = summarise(records)
    assert found.seconds == 29
    assert [stage.utilisation for stage in found.stages] == [12 / 29, 6 / 29]
    assert [stage.median_s for stage in found.stages] == [4, 2]
    assert (found.mean_rows, found.mean_nodes, found.tau) == (8, 2, 2)
    assert (found.step_s, found.draft_wait) == (9, 3 / 29)
    assert found.accepted == {"a": 1 / 3}


def sliced(step: int, request: int, nodes: int, killed: int) -> StepRecord:
    """A step with a slice, on its way from 2 to 8 s after each third of 10 s."""
    start = 10.0 * step / 3
    return replace(
        record(step), planned_at=start, submitted_at=start + 2, answered_at=start + 8,
        slices=(SliceCounts(request, nodes, killed),),
    )  # fmt: skip


def test_flights_of_a_request_have_lanes_of_their_own() -> None:
    records = [sliced(0, 4, 6, 0), sliced(1, 4, 6, 2), sliced(2, 5, 3, 3), sliced(3, 4, 0, 0)]
    assert kind_of(records[0]) == "slice"
    assert summarise(records).killed == 5 / 15
    lanes = flight_lanes(records, 4)
    # The second overlaps the first, the last one neither.
    assert [[bar.kind for bar in bars] for bars in lanes.values()] == [
        ["slice", "slice"],
        ["killed", "slice"],
    ]
    killed, rest = lanes["flight 2"]
    assert (killed.length, rest.length) == (pytest.approx(2), pytest.approx(4))
    with pytest.raises(ConfigError, match="request"):
        flight_lanes(records, 7)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("what was here before\n")
    records = [record(1), sliced(0, 3, 2, 1)]
    write(path, records)
    assert read_trace(path) == records[::-1]
    # A server that was killed leaves half a line.
    with path.open("a") as file:
        file.write(json.dumps(asdict(record(2)))[:50])
    assert len(read_trace(path)) == 2


def test_a_full_file_keeps_the_newest_steps(tmp_path: Path) -> None:
    path, older = tmp_path / "steps.jsonl", tmp_path / "steps.jsonl.1"
    write(path, [record(100)])
    line_bytes = path.stat().st_size
    # Steps 100 to 109: all lines are equally long.
    steps = range(100, 110)
    write(path, [record(step) for step in steps], 8 * line_bytes)
    assert [len(part.read_text().splitlines()) for part in (older, path)] == [4, 2]
    assert [one.step for one in read_trace(path)] == list(steps[4:])
    # A server that writes may rename the file between two looks.
    path.write_text(older.read_text())
    assert [one.step for one in read_trace(path)] == list(steps[4:8])
    with older.open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(ConfigError, match=r"steps\.jsonl\.1, line 5: not a step"):
        read_trace(path)
    # A start leaves nothing of what was there.
    write(path, [record(0)])
    assert [one.step for one in read_trace(path)] == [0]


def test_a_part_that_cannot_be_renamed_ends_the_trace_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.jsonl"
    file = TraceFile(path, 1)
    file.write(record(0))
    (tmp_path / "steps.jsonl.1").mkdir()
    file.write(record(1))
    file.write(record(2))
    file.close()
    assert caplog.messages == ["event=trace_ended reason='Is a directory'"]
    assert path.read_text().count("\n") == 1


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"step": 1}'])
def test_another_file_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, [record(0)])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match="line 2: not a step"):
        read_trace(path)


def test_an_engine_traces_every_stage_of_every_step(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    config = EngineConfig(
        model=str(checkpoint), pipeline_parallel_size=2, kv_cache_tokens=512, trace_steps=path,
        drafters=(DrafterConfig(kind="prompt_lookup"),),
    )  # fmt: skip
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    begin = time.time()
    with Engine(config) as engine:
        outputs = engine.generate(["abcabcabcabc", "xyxyxyxyxy"], params)
        num_steps = engine.stats().num_steps
    records = read_trace(path)
    assert [one.step for one in records] == list(range(num_steps))
    assert sum(one.tokens + one.first_tokens for one in records) == 24
    drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    assert sum(one.tree_nodes for one in records) == drafted
    for one in records:
        (first_begin, first_end), (last_begin, last_end) = one.stages
        assert begin <= one.planned_at <= one.submitted_at <= first_begin <= first_end
        assert first_end <= last_begin <= last_end <= one.answered_at <= one.committed_at


def test_command_prints_and_draws_the_chosen_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, png = tmp_path / "steps.jsonl", tmp_path / "steps.png"
    write(path, [record(step) for step in range(20)])
    arguments = ["trace", str(path), "--from-step", "3", "--to-step", "7", "--output", str(png)]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "3 to 7 (5 tree)" in result.output
    assert "stage 1" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no such steps"):
        runner.invoke(cli.app, ["trace", str(path), "--from-step", "50"], catch_exceptions=False)


def test_what_cannot_be_traced_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "none" / "steps.jsonl"
    with pytest.raises(ConfigError, match=r"trace_steps: cannot write .*steps\.jsonl"):
        Engine(EngineConfig(model=str(checkpoint), trace_steps=path))
    with pytest.raises(ConfigError, match="trace_steps: one file cannot hold"):
        build_serve_args({"trace_steps": "a.jsonl", "deployment": {"num_replicas": 2}})
    with pytest.raises(ConfigError, match=r"trace_steps_max_mb: .*greater than or equal to 1"):
        EngineConfig(trace_steps_max_mb=0)
