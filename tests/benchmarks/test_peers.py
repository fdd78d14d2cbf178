"""The comparison with other servers: their commands, tau and the table."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from draftline.benchmarks.peers.environment import PeerEnvironment
from draftline.benchmarks.peers.measure import InProcess, Measured, make_plans, tau
from draftline.benchmarks.peers.plot import RESULTS, read_modes, write_plot
from draftline.benchmarks.peers.report import BASE, Rows, fields, print_table
from draftline.benchmarks.peers.servers import draftline_server, running, vllm_server
from draftline.core.errors import ConfigError, DraftlineError
from draftline.measure.clients.prompts import BenchPrompt
from draftline.measure.records.record import Arrival
from draftline.measure.records.run_metrics import run_metrics
from draftline.measure.runs.matched import Plan
from rich.console import Console
from support.fakes.fake_endpoint import ANSWER, record


def measured(seconds: float, text: str) -> Measured:
    return Measured(metrics=run_metrics([record(ANSWER)], seconds), tau=2.0, texts=(text,))


def test_tau_is_what_the_server_counts_or_tokens_a_part() -> None:
    """Five tokens: the prompt's pass gives one, two passes two each."""
    told = record(ANSWER)
    assert tau([told, told]) == 2
    silent = replace(told, counts=None)
    assert tau([silent, silent]) == 2
    # A third part without tokens of its own: four tokens in three passes.
    assert tau([replace(silent, arrivals=(*silent.arrivals, Arrival(4.0)))]) == 4 / 3
    one = replace(silent, arrivals=silent.arrivals[:1], num_tokens=1)
    assert tau([one, silent]) == 2


def test_servers_get_the_same_threads_and_arithmetic(tmp_path: Path) -> None:
    peer = PeerEnvironment(tmp_path, "cpu")
    ours = draftline_server("x", ("spectra", "model"), 2)
    theirs = vllm_server("suffix", peer, 2)
    for spec in (ours, theirs):
        assert spec.environment["OMP_NUM_THREADS"] == "2"
        assert spec.command[spec.command.index("--dtype") + 1] == "float32"
        assert spec.command[spec.command.index("--max-num-seqs") + 1] == "32"
        assert spec.command[-1] == "--port"
    assert theirs.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    config = json.loads(ours.command[ours.command.index("--speculative-config") + 1])
    assert [drafter["kind"] for drafter in config] == ["spectra", "model"]
    assert "--speculative-config" not in vllm_server("plain", peer, 2).command
    assert "--enforce-eager" in vllm_server("plain", peer, 2, eager=True).command


def test_without_an_environment_there_is_no_vllm(tmp_path: Path) -> None:
    assert PeerEnvironment(tmp_path, "cpu").version() is None


def test_no_prompt_is_asked_twice() -> None:
    prompts = [BenchPrompt(str(index), "text") for index in range(12)]
    plans = make_plans(Plan(prompts=prompts), [1, 8], 2)
    parts = [plans.warm_up, *plans.by_streams.values()]
    assert [len(part.prompts) for part in parts] == [2, 2, 8]
    assert [prompt for part in parts for prompt in part.prompts] == prompts
    with pytest.raises(ConfigError, match=r"13 different ones are needed for .* there are 12"):
        make_plans(Plan(prompts=prompts), [1, 8], 3)


@pytest.mark.net
def test_a_server_that_ends_at_once_is_told_with_its_log(tmp_path: Path) -> None:
    spec = draftline_server("broken", (), 1)
    broken = type(spec)("broken", ("/bin/sh", "-c", "echo no; exit 3", "sh"))
    with (
        pytest.raises(DraftlineError, match=r"broken did not come up; see .*broken\.log"),
        running(broken, tmp_path),
    ):
        pass
    assert (tmp_path / "broken.log").read_text() == "no\n"


def test_the_table_and_its_json() -> None:
    rows = Rows()
    for seconds in (5.0, 2.5, 2.0):
        rows.add_server(BASE, 1, measured(seconds, "a"))
        rows.add_server(BASE, 8, measured(seconds, "a"))
        rows.add_server("vLLM, plain", 8, measured(seconds / 2, "b"))
    rows.add_in_process("transformers, plain, in process", 1, InProcess(3.0, 1.0, ((1,),)))
    console = Console(file=io.StringIO(), width=110)
    print_table(rows, console)
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "draftline, plain 1 2.0 (1.0 - 2.5) 1000.0 500.0 2.00 1 of 1" in lines
    assert "vLLM, plain 8 4.0 (2.0 - 5.0) 1000.0 500.0 2.00 0 of 1" in lines
    assert "transformers, plain, in process 1 3.0 (3.0 - 3.0) - - 1.00 -" in lines
    data = json.loads(json.dumps(fields(rows, {"threads": 1})))
    assert data["threads"] == 1
    assert [one["same_text"] for one in data["servers"]] == [1, 1, 0]
    assert [one["seconds"] for one in data["servers"][0]["rounds"]] == [5.0, 2.5, 2.0]


def test_picture_shows_every_mode_and_which_loads_were_not_measured(tmp_path: Path) -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    modes = {mode.name: mode for mode in read_modes(results)}
    assert set(results["commands"]) < set(modes)
    assert modes["vLLM, suffix"].rates.keys() == {1, 8, 32}
    assert modes["transformers, prompt lookup"].rates.keys() == {1}
    assert modes[BASE].colour != modes[f"{BASE}, compiled"].colour
    pytest.importorskip("matplotlib")
    write_plot(results, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 0
