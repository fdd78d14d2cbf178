"""The comparison with other servers: plans, commands, tau, processor time, prompts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from draftline.benchmarks.peers.catalogue import COMPARED, Peers, chosen, known_servers, shown
from draftline.benchmarks.peers.plan import (
    WARM_UP,
    estimated_seconds,
    fitting,
    make_starts,
    read_option,
    read_sets,
)
from draftline.benchmarks.peers.rounds import TRANSFORMERS, Asked, digests, make_turns, tau
from draftline.benchmarks.peers.servers import (
    LlamaBinary,
    PeerEnvironment,
    ProcessTimes,
    ServerSpec,
    belonging,
    cpu_seconds,
    draftline_server,
    first_cores,
    llama_server,
    read_processes,
    running,
    vllm_server,
)
from draftline.benchmarks.peers.target import Target
from draftline.core.errors import ConfigError, DraftlineError
from draftline.deploy.cli.serve.options import command_settings
from draftline.deploy.settings.settings import build_serve_args
from draftline.measure.prompts import BenchPrompt
from draftline.measure.records import Arrival
from draftline.models.load.bundled import demo_path
from support.fakes.fake_endpoint import ANSWER, record

DEMO = Target("demo")


@pytest.fixture
def chat_target(tmp_path: Path) -> Target:
    """A model folder that is nobody's bundled model, with a chat template."""
    folder = tmp_path / "talker"
    shutil.copytree(demo_path("demo-drafter"), folder)
    assert (folder / "chat_template.jinja").is_file()
    return Target(str(folder))


def prompts(count: int, name: str = "p") -> list[BenchPrompt]:
    return [BenchPrompt(f"{name}{index}", f"text {name} {index}") for index in range(count)]


def option(command: tuple[str, ...], name: str) -> str:
    return command[command.index(name) + 1]


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
    # llama.cpp counts only where it drafted, and streams each token alone.
    alone = [Arrival(float(second)) for second in range(5)]
    assert tau([told, replace(silent, arrivals=tuple(alone))]) == 8 / (2 + 4)


def test_servers_get_the_same_threads_space_and_arithmetic(tmp_path: Path) -> None:
    ours = draftline_server(DEMO, "x", ("spectra", "model"), 2)
    theirs = vllm_server(DEMO, "suffix", PeerEnvironment(tmp_path, "cpu"), 2)
    llama = llama_server(DEMO, "draft_model", tmp_path / "llama-server", tmp_path, 2)
    for spec in (ours, theirs):
        assert option(spec.command, "--dtype") == "float32"
        assert option(spec.command, "--max-num-seqs") == "64"
        assert option(spec.command, "--max-model-len") == "1024"
    for spec in (ours, theirs, llama):
        assert spec.environment["OMP_NUM_THREADS"] == "2"
        assert spec.command[-1] == "--port"
    assert option(ours.command, "--kv-cache-tokens") == option(llama.command, "--ctx-size")
    assert option(llama.command, "--parallel") == "64"
    for flag in ("--threads", "--threads-batch", "--threads-draft", "--threads-batch-draft"):
        assert option(llama.command, flag) == "2"
    cores = theirs.environment["VLLM_CPU_OMP_THREADS_BIND"].split(",")
    assert cores == [str(core) for core in first_cores(2)]
    assert len(cores) == min(2, len(os.sched_getaffinity(0)))
    config = json.loads(option(ours.command, "--speculative-config"))
    assert [drafter["kind"] for drafter in config] == ["spectra", "model"]
    plain = vllm_server(DEMO, "plain", PeerEnvironment(tmp_path, "cpu"), 2, eager=True)
    assert "--speculative-config" not in plain.command
    assert "--enforce-eager" in plain.command


def test_the_default_is_what_serve_does_when_it_is_told_nothing() -> None:
    """On one stage."""
    command = draftline_server(DEMO, "default", None, 1).command
    assert "--speculative-config" not in command
    assert command[command.index("serve") + 1] == "--dtype"
    settings = command_settings({"pipeline_parallel_size": 1}, None, None)
    engine = build_serve_args(settings).engine
    assert (engine.model, engine.pipeline_parallel_size) == ("demo", 1)
    assert [one.kind for one in engine.drafters] == ["suffix", "prompt_lookup"]


def test_a_head_drafts_in_both_servers_that_load_it(tmp_path: Path) -> None:
    vllm, head = PeerEnvironment(tmp_path / "none", "cpu"), tmp_path / "head"
    config = json.loads(
        option(vllm_server(DEMO, "eagle3", vllm, 1, head=head).command, "--speculative-config")
    )
    assert (config["method"], config["model"]) == ("eagle3", str(head))
    peers = Peers(DEMO, vllm, None, tmp_path, 1, head=head)
    ours = known_servers(peers)["draftline, eagle3"]
    config = json.loads(option(ours.command, "--speculative-config"))
    assert config == [{"kind": "head", "model": str(head)}]
    assert str(tmp_path) not in shown(ours, peers, tmp_path / "root")
    assert "draftline, eagle3" not in known_servers(replace(peers, head=None))


def test_without_a_program_its_servers_are_not_known(tmp_path: Path) -> None:
    assert PeerEnvironment(tmp_path, "cpu").version() is None
    absent = LlamaBinary(tmp_path / "llama-server")
    assert absent.version() is None
    peers = Peers(DEMO, PeerEnvironment(tmp_path, "cpu"), absent, tmp_path, 1)
    assert {spec.family for spec in known_servers(peers).values()} == {"draftline"}


def test_a_program_says_its_version(tmp_path: Path) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho 'version: 7 (abc)' >&2\necho built with a compiler\n")
    binary.chmod(0o755)
    llama = LlamaBinary(binary)
    assert llama.version() == "7 (abc)"
    peers = Peers(DEMO, PeerEnvironment(tmp_path / "none", "cpu"), llama, tmp_path / "models", 1)
    known = known_servers(peers)
    assert [name for name in known if name.startswith("llama.cpp")] == [
        "llama.cpp, plain", "llama.cpp, ngram", "llama.cpp, draft_model",
    ]  # fmt: skip
    line = shown(known["llama.cpp, plain"], peers, tmp_path)
    assert line.startswith("llama-server --model MODELS/demo-F32.gguf")
    assert str(tmp_path) not in line
    assert sys.executable not in shown(known["draftline, plain"], peers, tmp_path)


def test_what_only_the_bundled_model_has_is_left_out_of_another_ones_servers(
    chat_target: Target, tmp_path: Path
) -> None:
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho 'version: 7 (abc)' >&2\n")
    binary.chmod(0o755)
    peers = Peers(
        chat_target, PeerEnvironment(tmp_path / "none", "cpu"), LlamaBinary(binary), tmp_path, 1
    )
    known = known_servers(peers)
    assert list(known) == [
        "llama.cpp, plain", "llama.cpp, ngram", "llama.cpp, Q8_0 plain", "llama.cpp, Q4_1 plain",
        "draftline, plain", "draftline, default", "draftline, suffix", "draftline, prompt_lookup",
        "draftline, token_recycling", "draftline, spectra", "draftline, all",
    ]  # fmt: skip
    narrow = known["llama.cpp, Q4_1 plain"].command
    assert option(narrow, "--model") == str(tmp_path / "talker-Q4_1.gguf")
    assert "--jinja" in narrow
    default = known["draftline, default"].command
    assert default[default.index("serve") + 1] == chat_target.name


def test_a_chat_model_is_asked_in_chats_that_end_where_they_end(chat_target: Target) -> None:
    (bundled,) = read_sets(chat_target, ["bundled"], 256).values()
    (chat, *_), (code, *_) = (
        Asked(target, 64, 0.7).asks(asked, "salt")
        for target, asked in ((chat_target, bundled), (DEMO, prompts(1)))
    )
    assert chat.prompt == ({"role": "user", "content": bundled[0].text},)
    assert (code.prompt, chat.ignore_eos, code.ignore_eos) == ("text p 0", False, True)
    assert (chat.temperature, chat.max_tokens, chat.seed) == (0.7, 64, 0)
    (unseeded, *_) = Asked(chat_target, 64, 0.7, is_seeded=False).asks(bundled, "salt")
    assert unseeded.seed is None
    # The template stands around what the user says.
    assert len(chat_target.prompt_ids("x")) > len(DEMO.prompt_ids("x"))


def test_servers_are_chosen_by_name() -> None:
    known = ["vLLM, plain", "vLLM, draft_model", "draftline, plain", "draftline, plain, other"]
    assert chosen(known, []) == ["vLLM, plain", "draftline, plain"]
    assert chosen([*COMPARED, "other"], []) == list(COMPARED)
    assert chosen(known, ["draftline, plain"]) == ["draftline, plain"]
    assert chosen(known, ["other", "vLLM"]) == [known[0], known[1], known[3]]
    assert chosen(known, [""]) == known
    with pytest.raises(ConfigError, match="'sglang' is in no name"):
        chosen(known, ["sglang"])


def test_no_prompt_is_asked_twice_behind_one_start() -> None:
    sets = {"a": prompts(12, "a"), "b": prompts(40, "b")}
    starts = make_starts(sets, [1, 4, 8], 2, seed=3)
    cells = [[(cell.label, cell.streams) for cell in start.cells] for start in starts]
    # 2 for the warm-up, 2 + 4 of the first set; 8 do not fit behind them.
    assert cells == [[("a", 1), ("a", 4), ("b", 1), ("b", 4), ("b", 8)], [("a", 8)]]
    for start in starts:
        asked = [*start.warm_up, *(prompt for cell in start.cells for prompt in cell.prompts)]
        assert len(start.warm_up) == WARM_UP
        assert len(set(asked)) == len(asked)
        for cell in start.cells:
            assert len(cell.prompts) == max(2, cell.streams)
            assert all(prompt in sets[cell.label] for prompt in cell.prompts)


def test_rounds_have_other_prompts_and_the_same_plan_each_time() -> None:
    sets = {"a": prompts(40)}
    assert make_starts(sets, [1, 8], 4, 0) == make_starts(sets, [1, 8], 4, 0)
    one, other = (make_starts(sets, [1, 8], 4, seed)[0].cells for seed in (0, 1))
    assert [cell.streams for cell in one] == [cell.streams for cell in other]
    assert set(one[0].prompts) != set(other[0].prompts)
    with pytest.raises(ConfigError, match="p has 9, and 10 different ones are needed for 8"):
        make_starts({"p": prompts(9)}, [1, 8], 2, 0)


def test_servers_take_turns_and_each_round_begins_with_another() -> None:
    starts = make_starts({"a": prompts(12)}, [1, 4, 8], 2, 0)
    specs = [ServerSpec(name, ()) for name in ("x", "y")]
    turns = make_turns([starts, starts], specs, transformers=True)
    assert [(turn.round, turn.server) for turn in turns] == [
        (0, TRANSFORMERS), (0, TRANSFORMERS),
        (0, "x"), (0, "y"), (0, "x"), (0, "y"), (1, "y"), (1, "x"), (1, "y"), (1, "x"),
    ]  # fmt: skip
    # It is asked one at a time and eight at a time.
    assert [turn.cells for turn in turns[:2]] == [[("a", 1)], [("a", 8)]]
    assert make_turns([starts], [], transformers=False) == []
    assert (
        estimated_seconds(starts[0], "vLLM", 16, 0.01)
        > estimated_seconds(starts[0], "x", 16, 0.01)
        > estimated_seconds(starts[0], "x", 16, 0.001)
        > 0
    )


def test_prompts_that_the_model_cannot_read_are_left_out(tmp_path: Path) -> None:
    found = [*prompts(2), BenchPrompt("again", "text p 0"), BenchPrompt("long", "w " * 50)]
    assert fitting(found, len, 20) == prompts(2)
    assert read_option("bundled") == ("bundled", None)
    assert read_option("code=x/y=z.jsonl") == ("code", Path("x/y=z.jsonl"))
    for wrong in ("code", "=x", "code="):
        with pytest.raises(ConfigError, match="neither bundled nor LABEL=FILE"):
            read_option(wrong)
    path = tmp_path / "code.jsonl"
    texts = ["def f():", "x = 1\n" * 1000]
    path.write_text("".join(f"{json.dumps({'name': text[0], 'prompt': text})}\n" for text in texts))
    sets = read_sets(DEMO, ["bundled", f"code={path}"], 896)
    assert [prompt.text for prompt in sets["code"]] == texts[:1]
    assert len(sets["bundled"]) > 60
    with pytest.raises(ConfigError, match="code is given twice"):
        read_sets(DEMO, [f"code={path}", f"code={path}"], 896)


def test_processes_of_a_server_are_its_session_and_what_that_started() -> None:
    processes = [
        ProcessTimes(9, 8, 9, 32),
        ProcessTimes(7, 1, 7, 1),
        ProcessTimes(8, 7, 7, 2),
        # Its parent is gone, but not its session.
        ProcessTimes(6, 1, 7, 4),
        ProcessTimes(5, 1, 5, 64),
    ]
    assert sum(one.ticks for one in belonging(7, processes)) == 1 + 2 + 4 + 32
    assert belonging(4, processes) == []


def test_processor_time_is_read_with_names_that_hold_brackets(tmp_path: Path) -> None:
    rest = " ".join(["S", "1", "7", "7", *["0"] * 7, "100", "20", "3", "4", "0"])
    for pid, name in ((7, "(a) b) c"), (8, "(x")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) {rest}")
    # One that ended between the listing and the reading.
    (tmp_path / "9").mkdir()
    assert sorted(read_processes(tmp_path), key=lambda one: one.pid) == [
        ProcessTimes(7, 1, 7, 127),
        ProcessTimes(8, 1, 7, 127),
    ]
    assert cpu_seconds(7, tmp_path) is None
    (tmp_path / "self").mkdir()
    assert cpu_seconds(7, tmp_path) == pytest.approx(254 / os.sysconf("SC_CLK_TCK"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_work_of_a_child_is_counted() -> None:
    child = "t = __import__('time').process_time\nwhile t() < 0.2: pass\nprint(); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        seconds = cpu_seconds(process.pid)
        process.communicate(b"\n")
    assert seconds is not None
    assert seconds >= 0.15


def test_digests_tell_answers_apart() -> None:
    one, other, again = digests(["a", "b", "a"])
    assert one == again != other


@pytest.mark.net
def test_a_server_that_ends_at_once_is_told_with_its_log(tmp_path: Path) -> None:
    broken = ServerSpec("broken", ("/bin/sh", "-c", "echo no; exit 3", "sh"))
    with (
        pytest.raises(DraftlineError, match=r"broken did not come up; see .*broken\.log"),
        running(broken, tmp_path),
    ):
        pass
    assert (tmp_path / "broken.log").read_text() == "no\n"
