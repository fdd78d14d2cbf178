"""Command lines of the pages: each is run as printed, or at least read as its command reads it.

What is run has the bundled model in place of names that stand for a model. `EXTERNAL` are commands
of others, `ONLY_READ` those of this package that are not run here, each with the reason. Those of
start.md run with the whole matrix, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
import yaml
from draftline.cluster.config import EngineConfig
from draftline.deploy.cli.bench import run as bench_run
from draftline.deploy.cli.bench import run as lossless_run
from draftline.deploy.cli.main import app
from draftline.deploy.cli.serve import command as serve_command
from draftline.deploy.cli.train import export as train_export
from draftline.deploy.cli.train import fit as train_fit
from draftline.deploy.cli.train import texts as train_data
from draftline.deploy.settings.settings import build_serve_args
from support.servers.served_model import served_model
from support.tools.command_lines import (
    PAGES,
    PrintedCommand,
    block_commands,
    block_lines,
    simple_commands,
    span_commands,
)
from support.tools.tree_copy import ROOT
from typer.testing import CliRunner

START = ROOT / "docs" / "start.md"
# What stands for a model in a page, and what is taken for it.
STANDS_FOR = {
    "FOLDER": "demo", "MODEL": "demo", "M": "demo", "TARGET": "demo", "SMALLER_FOLDER":
    "demo-drafter",
}  # fmt: skip
PLACEHOLDER = re.compile(rf"\b({'|'.join(STANDS_FOR)})\b")
EXTERNAL = {
    "make": "runs what other lines run; its targets are looked up",
    "python -m pytest": "tests; test_gpu_first_run.py looks up its folders",
    "python -m build": "test_distributions.py builds",
    "python3 -m venv": "packages have to be installed; the environment of the tests is one",
    ".": "activates an environment",
    "pip": "needs a package index",
    "tar": "unpacks what pip fetched",
    "cmake": "builds another project",
    "nvidia-smi": "needs a GPU",
    "docker": "needs a container engine; test_containers.py reads its files",
    "deploy/docker/make-secrets.sh": "test_containers.py runs it",
    "deploy/kuberay/monitoring.sh": "test_kuberay.py runs it",
    "bash": "observe.sh, on the head of a cluster; test_clusters.py runs it",
    "curl http://127.0.0.1:4000": "asks a gateway that docker starts",
    "ray": "needs a cloud; test_clusters.py and test_ray_up.py read its files",
    "serve": "Ray's own command; tests/deploy/ray_serve serves these applications",
    "helm": "needs Kubernetes",
    "kubectl": "needs Kubernetes; test_kuberay.py reads its files",
    "redis-server": "test_whole_deployment.py starts one",
    "sed": "test_70b.py runs it",
    "open-webui": "not installed here; docs/clients.md says what was tried",
    "inspect": "not installed here; docs/clients.md says what was tried",
    "lm_eval": "not installed here; docs/clients.md says what was tried",
    "for": "the shell's",
    "sh -c until": "waits for a server",
    "kill": "the shell's",
    "wait": "the shell's",
    "done": "the shell's",
}
ONLY_READ = {
    "draftline serve": "a server for each would take minutes; those of start.md are run",
    "draftline bench": "takes minutes as printed; start.md's is run, others small in test_bench.py",
    "draftline lossless": "takes a minute as printed; start.md's is run",
    "draftline doctor --cluster": "needs a cluster; test_cluster_checks.py runs it",
    "draftline train": "takes hours as printed; test_train.py runs it small",
    "draftline corpus add more.parquet": "needs pyarrow, an extra",
    "python -m draftline.actors": "runs until it is stopped; their tests do so",
    "python -m draftline.benchmarks": "takes minutes to hours",
    "python -m draftline.deploy.cli.demo": "takes hours",
}
# An error is one to the shell, too. Servers hear of a new tenant a moment later.
CURL = "--silent --show-error --fail-with-body --retry 30 --retry-delay 1 --retry-all-errors"
# Of `ONLY_READ`, those that `settings_only` stops behind their checks.
STOPPED = ("serve", "bench", "lossless", "train")
COMMANDS = [command for page in PAGES for command in block_commands(page)]
SPANS = [command for page in PAGES for command in span_commands(page)]
OWN = [one for one in COMMANDS if one.words[0] == "draftline"]
# By their words: many stand on several pages.
MODULES = {
    one.words[2:]: one
    for one in (*COMMANDS, *SPANS)
    if one.words[:2] == ("python", "-m") and one.words[2].startswith("draftline.")
}
runner = CliRunner()


def reasons(command: PrintedCommand, table: dict[str, str]) -> list[str]:
    return [begin for begin in table if command.begins(begin)]


def is_run_by_start(command: PrintedCommand) -> bool:
    return command.page == "docs/start.md" and not reasons(command, EXTERNAL)


def in_words_of_the_page(command: PrintedCommand) -> tuple[str, ...]:
    """Its arguments, with the bundled model."""
    return tuple(
        PLACEHOLDER.sub(lambda found: STANDS_FOR[found[1]], word) for word in command.words
    )


RUN = [one for one in OWN if not reasons(one, ONLY_READ) and not is_run_by_start(one)]


def test_every_command_of_the_pages_is_run_or_has_a_reason() -> None:
    assert OWN
    assert SPANS
    known = {"draftline", "curl", "openssl", "umask"}
    unknown = [
        str(one)
        for one in COMMANDS
        if one.words[0] not in known and not reasons(one, EXTERNAL) and not reasons(one, ONLY_READ)
    ]
    assert not unknown
    unused = {**EXTERNAL, **ONLY_READ}.keys() - {
        begin for one in COMMANDS for begin in reasons(one, {**EXTERNAL, **ONLY_READ})
    }
    assert not unused


def test_files_that_commands_name_are_there() -> None:
    inside = ("deploy/", "tests/", "scripts/", "examples/", "benchmarks/")
    missing = [
        f"{one}: {word}"
        for one in COMMANDS
        for word in one.words
        if word.startswith(inside) and not (ROOT / word).exists()
    ]
    assert not missing


def test_targets_of_make_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?m)^([a-z-]+):", makefile))
    named = {
        word
        for one in COMMANDS
        if one.words[0] == "make"
        for word in one.words[1:]
        if "=" not in word
    }
    assert named <= targets


def leaf_of(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and the words that follow."""
    command: Any = typer.main.get_command(app)
    left = list(words[1:])
    while left and left[0] in getattr(command, "commands", {}):
        command = command.commands[left.pop(0)]
    return command, left


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_have_arguments_that_exist(page: Path) -> None:
    """They may leave out what is required, but not name what is not there."""
    for printed in span_commands(page):
        if printed.words[0] != "draftline":
            continue
        command, left = leaf_of(printed.words)
        if not getattr(command, "commands", None):
            # `--acceptance` alone, without a value, names the option.
            options = {
                flag for one in command.get_params(typer.Context(command)) for flag in one.opts
            }
            value = ["x"] if left and left[-1] in options else []
            value = [] if left and left[-1] in _switches(command) else value
            _, extra, given = command.make_parser(typer.Context(command)).parse_args(
                [*left, *value]
            )
            assert not extra, printed
            assert not any(getattr(one, "hidden", False) for one in given), printed
        else:
            assert left in ([], ["--help"]), printed


def _switches(command: Any) -> set[str]:
    return {
        flag
        for one in command.get_params(typer.Context(command))
        if getattr(one, "is_flag", False)
        for flag in (*one.opts, *one.secondary_opts)
    }


@pytest.fixture
def settings_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands check what they are given, with the files that the pages name, and do not begin."""

    def check(settings: Mapping[str, Any]) -> int:
        if settings:
            build_serve_args(settings)
        return 0

    monkeypatch.setattr(serve_command, "run_server", lambda settings, *_: check(settings))
    monkeypatch.setattr(bench_run, "run_bench", lambda _job, settings, *_: check(settings))
    monkeypatch.setattr(lossless_run, "run_lossless", lambda _job, settings, *_: check(settings))
    monkeypatch.setattr(train_export, "export_published", lambda *_: None)
    monkeypatch.setattr(train_fit, "fit_head", lambda *_: None)
    monkeypatch.setattr(train_data, "make_texts", lambda *_: None)
    monkeypatch.delenv("DRAFTLINE_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    write_start_files(tmp_path)
    (tmp_path / "serve.yaml").write_text("model: demo\n")


@pytest.mark.usefixtures("settings_only")
@pytest.mark.parametrize("printed", [one for one in OWN if reasons(one, ONLY_READ)], ids=str)
def test_arguments_of_commands_that_are_not_run(printed: PrintedCommand) -> None:
    words = [word.replace("$transport", "nccl") for word in in_words_of_the_page(printed)]
    if words[1] in STOPPED:
        result = runner.invoke(app, words[1:])
        assert result.exit_code == 0, (result.output, result.exception)
    else:
        command, left = leaf_of(words)
        command.make_context(words[1], left)


class Read(BaseException):
    """A module read its arguments."""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("printed", MODULES.values(), ids=str)
def test_arguments_of_modules(printed: PrintedCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *arguments = printed.words[2:]
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    if "typer.run(main)" not in source and "parse_args(" not in source:
        assert not arguments, "it takes none"
        return
    parse_args = argparse.ArgumentParser.parse_args

    def read_typer(function: Any) -> None:
        module = typer.Typer(add_completion=False)
        module.command()(function)
        typer.main.get_command(module).make_context(name, arguments)
        raise Read

    def read_argparse(parser: Any, *_: Any) -> None:
        parse_args(parser, arguments)
        raise Read

    monkeypatch.setattr(typer, "run", read_typer)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read_argparse)
    with pytest.raises(Read):
        runpy.run_module(name, run_name="__main__")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ray's open files
@pytest.mark.parametrize("printed", RUN, ids=str)
def test_commands_of_other_pages(
    printed: PrintedCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path)
    dashboards = tmp_path / "metrics" / "grafana" / "dashboards"
    dashboards.mkdir(parents=True)
    is_head = "--drafter" in printed.words
    words = [
        "demo-griffin" if is_head and word == "FOLDER" else own.replace("$RAY_SESSION", ".")
        for word, own in zip(printed.words, in_words_of_the_page(printed), strict=True)
    ]
    result = runner.invoke(app, words[1:])
    assert result.exit_code == 0, (result.output, result.exception)


def write_documents(folder: Path) -> None:
    """What pages make a corpus of."""
    text = (ROOT / "docs" / "serving.md").read_text("utf-8")
    (folder / "notes").mkdir()
    (folder / "notes" / "serving.md").write_text(text[:3000])
    (folder / "answers.jsonl").write_text(json.dumps({"text": text[3000:5000]}) + "\n")


def write_start_files(folder: Path) -> dict[str, Any]:
    """The files that start.md prints; returns the drafters of a corpus, which it prints last."""
    text = START.read_text(encoding="utf-8")
    model, keys, corpus = (
        PLACEHOLDER.sub(lambda found: STANDS_FOR[found[1]], block)
        for block in re.findall(r"(?ms)^```yaml\n(.*?)^```", text)
    )
    (folder / "server.yaml").write_text(model + keys)
    for name in ("operator.key", "acme.key"):
        (folder / name).write_text(f"of-{name}\n")
        (folder / name).chmod(0o600)
    return yaml.safe_load(corpus)


class StartPage:
    """Runs the lines of start.md one after the other, in a folder.

    A server is started when the first line after it asks for one. `serve` of the same settings is
    the same server, which has the flags of the longest line that begins like it.
    """

    def __init__(self, folder: Path, lines: list[str]) -> None:
        self._folder = folder
        self._serves = [line for line in lines if line.startswith("draftline serve ")]
        self._stack = ExitStack()
        self._wanted = self._running = ""
        self._url = ""
        self.served: set[str] = set()

    def run(self, line: str) -> None:
        if line.startswith("draftline serve "):
            self._wanted = max((one for one in self._serves if one.startswith(line)), key=len)
            return
        if line.startswith("curl ") and self._running != self._wanted:
            self._start()
        if line.startswith("draftline ") and ">" not in line:
            # In this process, which has loaded its libraries.
            result = runner.invoke(app, shlex.split(line, comments=True)[1:])
            assert result.exit_code == 0, (line, result.output, result.exception)
            return
        line = line.replace("curl ", f"curl {CURL} ", 1)
        line = line.replace("http://127.0.0.1:8000", self._url)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", f"umask 077; {line}"], cwd=self._folder, env=os.environ | {"PATH": path},
            capture_output=True, check=False, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"

    def _start(self) -> None:
        self._stack.close()
        arguments = shlex.split(self._wanted, comments=True)[2:]
        served = self._stack.enter_context(served_model(*arguments))
        port = re.search(r":(\d+)/v1$", served.url)
        assert port
        self._url, self._running = f"http://127.0.0.1:{port[1]}", self._wanted
        self.served.add(self._wanted)

    def close(self) -> None:
        self._stack.close()


@contextmanager
def start_page(folder: Path, lines: list[str]) -> Iterator[StartPage]:
    page = StartPage(folder, lines)
    try:
        yield page
    finally:
        page.close()


@pytest.mark.full
@pytest.mark.net
@pytest.mark.timeout(600)
def test_the_first_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All lines of start.md that need nothing but this machine, in their order."""
    monkeypatch.chdir(tmp_path)
    corpus = write_start_files(tmp_path)
    write_documents(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for name in ("operator.key", "acme.key"):
        (tmp_path / name).unlink()
    # The server has a store from the start, in place of starting another one for it.
    made = runner.invoke(app, ["tenant", "create", "other", "--store", "tenants.yaml"])
    assert made.exit_code == 0, made.output
    blocks = re.findall(r"(?ms)^```sh\n(.*?)^```", START.read_text(encoding="utf-8"))
    lines = [
        PLACEHOLDER.sub(lambda found: STANDS_FOR[found[1]], line)
        for block in blocks
        for line in block_lines(block)
        if not any(
            reasons(PrintedCommand("docs/start.md", line, words), EXTERNAL)
            for words in simple_commands(line)
        )
    ]
    with start_page(tmp_path, lines) as page:
        for line in lines:
            page.run(line)
        assert len(page.served) == 2
    EngineConfig.model_validate({"model": "demo", **corpus})
