"""The command line: help, errors in one line, a served model from start to signal."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from draftline import Engine, EngineConfig, SamplingParams, __version__
from draftline.deploy.cli import main as cli
from draftline.deploy.cli.doctor import run_doctor
from draftline.kernels import dispatch
from draftline.kernels.cpu import build as cpu_build
from draftline.models.load.bundled import demo_path
from rich.console import Console
from support.contracts.client_contract import check_client
from support.inputs import head_checkpoints as published
from support.inputs.mtp_checkpoint import write_mtp_checkpoint
from support.inputs.quantized_checkpoints import FORMATS, quantize
from support.servers.served_model import COMMAND, served_model
from support.servers.stopped_streams import WHOLE, streams_through_sigterm
from support.tools.tiny_models import save_tiny_model
from typer.testing import CliRunner

COMMANDS = (
    "serve", "generate", "demo", "doctor", "corpus", "train", "bench", "lossless", "tenant",
    "dashboard", "fetch",
)  # fmt: skip
runner = CliRunner()


def test_version() -> None:
    assert runner.invoke(cli.app, ["--version"]).output == f"draftline {__version__}\n"


def test_help_names_every_command() -> None:
    import typer.main

    assert set(typer.main.get_command(cli.app).commands) == set(COMMANDS)
    output = runner.invoke(cli.app, ["--help"]).output
    for command in COMMANDS:
        assert command in output


def test_every_flag_has_help() -> None:
    import typer.main

    group = typer.main.get_command(cli.app)
    pending = [group]
    while pending:
        command = pending.pop()
        pending += getattr(command, "commands", {}).values()
        assert command.help
        for parameter in command.get_params(typer.Context(command)):
            assert getattr(parameter, "help", None), f"{command.name} {parameter.name}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace", "x.json"], "trace: was removed; open the file of --trace-steps in ui."),
        (["train", "blockwise", "--texts", "x"], "train blockwise: was removed; use train medusa"),
        (["train", "token-map", "--size", "3"], "train token-map: was removed; heads draft all"),
        (["bench", "--token-map", "demo"], "--token-map: was removed; leave it out"),
        (["serve", "no/such/model", "--port", "0"], "model folder no/such/model does not exist"),
        (["serve", "--config", "none.yaml"], "config: cannot read none.yaml"),
        (["serve", "--speculative-config", "{"], "speculative-config: not valid JSON"),
        (["serve", "--host", "0.0.0.0"], "server.host: '0.0.0.0' is reached from other"),
        (["generate", "x", "--top-p", "3"], "top_p: must be above 0"),
        (["corpus", "list", "--store", "http://x"], "store: 'http://x' is neither"),
        (["bench", "--prompts", "none.jsonl"], "prompts: cannot read none.jsonl"),
        (["bench", "--drafters", "medusa"], "drafters: 'medusa' is not there; known: suffix"),
    ],
)
def test_mistakes_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["draftline", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_doctor_tells_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code in (0, 1)
    for subject in (
        "python",
        "torch",
        "ray",
        "redis-server",
        "model demo",
        "weights of demo",
        "dtype: auto",
        "attention: auto",
        "compile: auto",
        "CUDA graphs",
        "stage_transport",
    ):
        assert subject in result.output


@pytest.mark.parametrize(
    ("shapes", "exit_code", "said"),
    [
        (published.p_eagle(), 1, ("p_eagle", "2 heads of 8 (1 of keys)", "layers 1, ")),
        (published.griffin(), 1, ("griffin", "2 heads of 8 (1 of keys)", "features of 16")),
        ({"prefix_gru.weight": (4, 4)}, 1, ("domino", "has none for kind domino")),
        ({"encoder.weight": (4, 4)}, 2, ("encoder.weight",)),
    ],
)
def test_doctor_says_what_a_drafter_is_and_whether_it_fits(
    tmp_path: Path,
    shapes: published.Shapes,
    exit_code: int,
    said: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Others know no mask.
    folder = published.save(tmp_path, shapes, published.P_EAGLE)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["draftline", "doctor", "--drafter", str(folder)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    assert ended.value.code == exit_code, captured.err
    assert all(part in captured.out + captured.err for part in said), captured.out


def test_doctor_says_how_weights_are_stored_and_what_they_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pair = quantize(demo_path(), FORMATS["awq"], tmp_path)

    def line(model: Path) -> str:
        # Wide enough for a path in a column.
        console = Console(highlight=False, width=400, file=io.StringIO())
        with console.capture() as capture:
            run_doctor(console, str(model))
        lines = capture.get().splitlines()
        return next(one for one in lines if f"weights of {model}" in one)

    assert "stored as plain bfloat16, 10.3 MiB; loaded they take 14.3 MiB" in line(demo_path())
    assert "stored as AWQ, 4 bits, groups of 16, " in line(pair.quantized)
    assert "loaded they take 9.4 MiB in float32 over all stages; by" in line(pair.quantized)
    assert "by quantization: int8 10.3 MiB, int4 8.3 MiB, fp8 10.3 MiB" in line(pair.quantized)
    config = json.loads((pair.quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (pair.quantized / "config.json").write_text(json.dumps(config))
    assert line(pair.quantized).startswith("missing")
    assert "quant_method 'hqq' are not read" in line(pair.quantized)


@pytest.mark.compiler
def test_doctor_says_what_rounding_does_to_the_perplexity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def line(model: str, kind: str) -> str:
        console = Console(highlight=False, width=400, file=io.StringIO())
        with console.capture() as capture:
            run_doctor(console, model, kind)
        start = re.compile(rf"\w+ +quantization: {kind} ")
        [found] = filter(start.match, capture.get().splitlines())
        return found

    found = {}
    for kind in ("int8", "int4"):
        said = line("demo", kind)
        assert re.search(r"perplexity of 5\d\d tokens", said)
        found[kind], exact = map(float, re.findall(r"\d+\.\d+", said))
    assert abs(found["int8"] / exact - 1) < 0.01 < found["int4"] / exact - 1 < 0.2
    assert "does not exist" in line("./nowhere", "fp8")


def test_doctor_says_what_states_take(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3_next", tmp_path)
    console = Console(highlight=False, width=400, file=io.StringIO())
    with console.capture() as capture:
        run_doctor(console, str(folder))
    [line] = [one for one in capture.get().splitlines() if f"states of {folder}" in one]
    # Of three layers: 4 heads of 8 x 8, and 3 inputs of 64 channels.
    state, row = 3 * 4 * (4 * 64 + 3 * 64), 3 * 4 * (2 * 8 + 4 * (8 + 1) + 64)
    assert "for max_num_seqs: 16" in line
    # Of 16 requests, as many snapshots, the largest step, and a tree of 16 nodes of each request.
    assert f"{(32 * state + (512 + 16 * 17) * row) / 2**20:.1f} MiB for" in line
    with Engine(EngineConfig(model=str(folder))) as engine:
        [kept] = engine.stats().stage_memory
    # Rows before the texts, and their ends, are not counted.
    assert kept.states == pytest.approx(32 * state + (512 + 16 * 17) * row, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "size"), [("llama", 4 * 2 * 2 * 8), ("deepseek_v3", 4 * 24), ("kimi_linear", 2 * 24)]
)
def test_doctor_says_what_a_token_takes(kind: str, size: int, tmp_path: Path) -> None:
    folder = save_tiny_model(kind, tmp_path)
    console = Console(highlight=False, width=400, file=io.StringIO())
    with console.capture() as capture:
        run_doctor(console, str(folder))
    [line] = [one for one in capture.get().splitlines() if f"KV cache of {folder}" in one]
    assert f"{4 * size / 2**10:.1f} KiB a token" in line
    assert ("latents" in line) == (kind != "llama")


@pytest.mark.parametrize(("count", "said"), [(1, "the layer of"), (2, "the first of 2 layers of")])
def test_doctor_knows_a_models_own_layer(count: int, said: str, tmp_path: Path) -> None:
    folder = str(write_mtp_checkpoint(tmp_path, "glm4_moe", count))
    result = runner.invoke(cli.app, ["doctor", "--drafter", "mtp", "--model", folder])
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    # Experts of 64 x 32, attention, the projection of both inputs.
    assert f"mtp, 0.1 M parameters, {said}" in text
    assert "of 64" in text
    result = runner.invoke(cli.app, ["doctor", "--drafter", "mtp"])
    assert result.exit_code == 1
    assert "mtp needs a model with MTP layers" in " ".join(result.output.split())


def test_doctor_knows_the_bundled_head() -> None:
    result = runner.invoke(cli.app, ["doctor", "--drafter", "demo-griffin"])
    assert result.exit_code == 0
    assert "griffin, 1.6 M parameters" in result.output


@pytest.mark.parametrize(
    ("against", "said"),
    [(None, "is taken for prompts"), ("it needs a GPU", "no: it needs a GPU")],
)
def test_doctor_says_whether_flash_attn_would_be_taken_and_why_not(
    against: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dispatch, "flash_obstacle", lambda *_: against)
    console = Console(highlight=False, width=200, file=io.StringIO())
    with console.capture() as capture:
        run_doctor(console, "demo")
    [line] = [one for one in capture.get().splitlines() if "flash-attn" in one]
    assert line.rstrip().endswith(said)


def test_doctor_says_which_operators_a_cpu_gets_and_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    library = tmp_path / "cpu_ops.so"
    monkeypatch.setattr(cpu_build, "library_path", lambda _folder: library)

    def told() -> str:
        return " ".join(runner.invoke(cli.app, ["doctor"]).output.split())

    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "compile: auto picks torch's own: it needs a C++ compiler" in told()
    monkeypatch.setenv("CXX", sys.executable)
    assert "builds them at the first start" in told()
    library.touch()
    assert "compile: auto picks C++ kernels of" in told()


@pytest.mark.parametrize(
    ("num_gpus", "has_nccl", "picked"),
    [
        (4, True, "auto picks nccl: 4 GPUs"),
        (4, False, "auto picks distributed: torch was built without NCCL"),
        (1, True, "auto picks distributed: this machine has 1 GPU"),
    ],
)
def test_doctor_on_gpus(
    num_gpus: int, has_nccl: bool, picked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=80 * 2**30)
    for name, answer in {
        "is_available": True, "device_count": num_gpus, "get_device_name": "A GPU",
        "get_device_properties": properties, "get_device_capability": (9, 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    # Whatever the width of the table.
    output = " ".join(runner.invoke(cli.app, ["doctor"]).output.split())
    assert f"{num_gpus - 1}: A GPU, 80 GiB" in output
    assert picked in output
    assert "C compiler" in output
    assert "install gcc" in output
    assert "picks triton: a GPU" in output
    assert "picks cuda: torch sees a GPU" in output


def test_generate_prints_the_text_alone(checkpoint: Path) -> None:
    arguments = ["generate", "abcabcabc", "--model", str(checkpoint), "--max-tokens", "8"]
    arguments += ["--speculative-config", '[{"kind": "prompt_lookup"}]']
    run = subprocess.run([*COMMAND, *arguments], capture_output=True, check=True, timeout=170)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with Engine(EngineConfig(model=str(checkpoint))) as engine:
        [output] = engine.generate(["abcabcabc"], params)
    assert run.stdout.decode(errors="replace") == f"{output.text}\n"
    assert b"8 tokens" in run.stderr
    assert run.stderr.count(b"\n") == 1


def test_corpus_from_build_to_remove(checkpoint: Path, tmp_path: Path) -> None:
    text = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(60))
    (tmp_path / "a.py").write_text(text)
    store = ["--store", str(tmp_path / "store")]
    built = runner.invoke(
        cli.app, ["corpus", "build", str(tmp_path / "a.py"), *store, "--model", str(checkpoint)]
    )
    assert "kept 1 of 1 documents" in built.output
    assert "shared" in runner.invoke(cli.app, ["corpus", "list", *store]).output
    stats = runner.invoke(cli.app, ["corpus", "stats", *store]).output.splitlines()[1].split()
    assert stats[:4] == ["shared", "1", "1", f"{len(text):,}"]
    assert "removed" in runner.invoke(cli.app, ["corpus", "remove", "all", *store]).output
    assert "shared" not in runner.invoke(cli.app, ["corpus", "list", *store]).output
    assert list((tmp_path / "store" / "shared").iterdir())
    forgotten = runner.invoke(cli.app, ["corpus", "forget", "shared", *store]).output
    assert forgotten == "forgot shared: 1 entries deleted, nothing is left\n"
    assert not (tmp_path / "store" / "shared").exists()


@pytest.mark.net
@pytest.mark.timeout(600)
def test_what_serve_prints_is_true_and_reads_well() -> None:
    with served_model("demo", "--api-processes", "0") as served:
        root = served.url.removesuffix("/v1")
        assert served.lines == [
            f"draftline {__version__} · model demo · 1 stage · drafters suffix, prompt_lookup · "
            "local\n",
            "demo is a toy for trying draftline out: what it writes looks like Python and means "
            "little\n",
            "1 stage, the default; pipeline_parallel_size cuts models too large for one device\n",
            "tools: how this model calls them is not known from its chat template, so requests "
            "with tool_choice: auto get 400; name it with tool_call_parser (mistral, hermes, "
            "llama3_json)\n",
            f"ready: {served.url} and, for a browser, {root}/ui (ctrl-c stops it); try\n",
        ]
        assert httpx.get(root).json() == {"server": "draftline", "api": "/v1", "ui": "/ui"}
        assert "<html" in httpx.get(f"{root}/ui").text
        command, url, *options = shlex.split(served.curl)
        assert (command, url) == ("curl", f"{served.url}/completions")
        assert options[:3] == ["-H", "Content-Type: application/json", "-d"]
        answer = httpx.post(url, content=options[3], timeout=60).json()
        # The first line was `"""Read a JSON JSON JSON JSON`.
        lines = [line for line in answer["choices"][0]["text"].splitlines() if line.strip()]
        assert len(lines) >= 3
        words = " ".join(lines).split()
        assert all(words.count(word) <= 3 for word in words), words


@pytest.mark.net
@pytest.mark.timeout(600)
def test_serve_until_sigterm(checkpoint: Path) -> None:
    """The official client works against `draftline serve`; SIGTERM lets its streams end.

    Its key is not in the process's command line, which everybody can read.
    """
    arguments = [str(checkpoint), "--served-model-name", "tiny", "-pp", "2"]
    arguments += ["--api-key", "secret", "--speculative-config", '[{"kind": "spectra"}]']
    # Or the answers are over before the signal comes.
    arguments += ["--drain-timeout", "60", "--multi-step-ms", "0"]
    with served_model(*arguments) as served:
        # What is started, that calls of tools are not known, the address.
        assert len(served.lines) <= 3
        check_client(served.url, "secret")
        command_line = Path(f"/proc/{served.process.pid}/cmdline").read_bytes().split(b"\0")
        assert b"--served-model-name" in command_line
        assert b"secret" not in command_line
        assert streams_through_sigterm(served, "secret") == WHOLE
        assert served.process.stdout is not None
        # On a busy machine some of the streams may be over by then.
        said = r"(waiting up to 60 s for \d requests? \(once more ends them\)\n)?stopped\n"
        printed = served.process.stdout.read()
        assert re.fullmatch(said, printed), printed
        assert served.process.wait(60) == 0
