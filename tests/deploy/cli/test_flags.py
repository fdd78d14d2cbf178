"""Flags come from the fields of settings: each sets its field, and refuses what that refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import typer
import typer.main
from draftline import __version__
from draftline.cluster.config import EngineConfig
from draftline.core.errors import ConfigError
from draftline.deploy.cli import flags as flag_module
from draftline.deploy.cli import generate as generate_module
from draftline.deploy.cli.bench import run as bench_run
from draftline.deploy.cli.bench import run as lossless_run
from draftline.deploy.cli.bench.job import BENCH, LOSSLESS, BenchJob, LosslessJob
from draftline.deploy.cli.flags import FlagGroup, flag_options
from draftline.deploy.cli.main import app
from draftline.deploy.cli.serve import command as serve_command
from draftline.deploy.cli.serve.options import ENGINE, SERVER
from draftline.deploy.settings.settings import ServerConfig, build_serve_args
from draftline.deploy.settings.tenants import key_digest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

GROUPS = {"serve": (ENGINE, SERVER), "bench": (BENCH, ENGINE), "lossless": (LOSSLESS, ENGINE)}
# What a command asks for beside the flag under test.
NEEDED = {"serve": ["demo"], "bench": ["demo"], "lossless": ["demo"]}
# Flags that are refused without another.
BESIDE = {
    "profile": ["--suite", "spectra"],
    "heads": ["--suite", "heads"],
    "suite_rows": ["--suite", "model-drafters"],
    "small_model": ["--cost-profile", "8b-h100"],
    "host_slowdown": ["--cost-profile", "8b-h100"],
}
# Texts of flags whose form is checked at once.
FORMS = {"--heads": "name=folder", "--suite-rows": "TLI chain"}
# More than one flag can hold, or the command's argument.
NO_FLAG = {
    EngineConfig: {"drafters"},
    ServerConfig: {"tenants", "limits"},
    BenchJob: {"model", "rows"},
    LosslessJob: {"model"},
}
Run = Callable[..., tuple[object, str]]
NUMBERS = (-1, 0, 0.5, 1, 2, 3, 64, 1024, 70_000, 10**9)
# Its flags are made once for all tests.
COMMAND = typer.main.get_command(app)
runner = CliRunner()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What commands would have run: `settings` of serve, bench and generate, and a `job`."""
    seen: dict[str, Any] = {}
    monkeypatch.delenv("DRAFTLINE_API_KEY", raising=False)

    def measured(job: BenchJob | LosslessJob, settings: dict[str, Any], *_: Any) -> int:
        seen.update(job=job, settings=settings)
        return 0

    def shadow(job: LosslessJob, *_: Any) -> int:
        seen.update(job=job)
        return 0

    def engine(settings: dict[str, Any], *_: Any) -> None:
        seen.update(settings=settings)

    monkeypatch.setattr(serve_command, "run_server", engine)
    monkeypatch.setattr(generate_module, "run_generate", engine)
    monkeypatch.setattr(bench_run, "run_bench", measured)
    monkeypatch.setattr(lossless_run, "run_lossless", measured)
    monkeypatch.setattr(lossless_run, "run_shadow", shadow)
    return seen


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code and output of a command line."""

    def call(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            COMMAND.main(list(arguments), prog_name="draftline")
        captured = capsys.readouterr()
        return ended.value.code, captured.out + captured.err

    return call


def fields() -> list[Any]:
    return [
        pytest.param(command, group, name, info, id=f"{command}-{name}")
        for command, groups in GROUPS.items()
        for group in groups
        for name, info in flag_module._fields(group.kind).items()
        # The argument MODEL is the engine's model.
        if name not in NO_FLAG[group.kind] and not (group is ENGINE and name == "model")
    ]


def flag_of(group: FlagGroup, name: str) -> str:
    return group.names.get(name, (f"--{name.replace('_', '-')}",))[0]


def accepts(info: FieldInfo, value: object) -> bool:
    kind: Any = Annotated[info.annotation, info]  # pyright: ignore[reportInvalidTypeForm]
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


def given(info: FieldInfo, flag: str) -> Iterator[tuple[list[str], object]]:
    """Arguments and the value that they set the field to."""
    kind = flag_module._flag_type(info.annotation)
    if kind is bool:
        yield [flag], True
        yield [flag.replace("--", "--no-", 1)], False
    elif get_origin(kind) is Literal:
        for choice in get_args(kind):
            yield [flag, choice], choice
    elif kind == list[str]:
        yield [flag, "a", flag, "b"], ("a", "b")
    elif kind in (int, float):
        value = next(kind(one) for one in NUMBERS if kind(one) == one and accepts(info, kind(one)))
        yield [flag, str(value)], value
    else:
        text = FORMS.get(flag, "a text")
        yield [flag, text], kind(text)


@pytest.mark.parametrize(("command", "group", "name", "info"), fields())
def test_every_flag_sets_its_field(
    command: str, group: FlagGroup, name: str, info: FieldInfo, ran: dict[str, Any], run: Run
) -> None:
    for arguments, value in given(info, flag_of(group, name)):
        code, output = run(command, *NEEDED[command], *BESIDE.get(name, []), *arguments)
        assert not code, output
        if group is SERVER:
            found = ran["settings"]["server"][name]
        elif group is ENGINE:
            found = ran["settings"][name]
        else:
            found = getattr(ran["job"], name)
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(("command", "group", "name", "info"), fields())
def test_a_wrong_value_names_the_flag(
    command: str, group: FlagGroup, name: str, info: FieldInfo, ran: dict[str, Any], run: Run
) -> None:
    kind, flag = flag_module._flag_type(info.annotation), flag_of(group, name)
    if kind is bool:
        wrong = [[f"{flag}=perhaps"]]
    elif kind in (int, float):
        outside = [one for one in NUMBERS if not accepts(info, kind(one))]
        wrong = [[flag, text] for text in ("x", *map(str, outside))]
    elif get_origin(kind) is Literal:
        wrong = [[flag, "nothing-like-it"]]
    else:
        wrong = [[flag]]
    for arguments in wrong:
        code, output = run(command, *NEEDED[command], *arguments)
        assert code == 2, arguments
        assert flag in output
        assert not ran


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "70000"], "'--port': Input should be less than or equal to 65535"),
        (["serve", "--port", "x"], "'--port': "),
        (["serve", "-pp", "0"], "Input should be greater than or equal to 1"),
        (["serve", "--gpus-per-stage", "0"], "'--gpus-per-stage': Input should be greater than 0"),
        (["serve", "--max-model-len", "1"], "'--max-model-len': Input should be greater than or"),
        (["serve", "--dtype", "int3"], "'--dtype': "),
        (["bench", "--concurrency", "0"], "'--concurrency': Input should be greater than"),
        (["bench", "--request-rate", "0"], "'--request-rate': Input should be greater than 0"),
        (["lossless", "--seeds", "0"], "'--seeds': Input should be greater than"),
    ],
)
def test_bounds_are_those_of_the_fields(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("kind", NO_FLAG, ids=lambda kind: kind.__name__)
def test_only_what_one_flag_cannot_hold_has_none(kind: type) -> None:
    group = next(one for groups in GROUPS.values() for one in groups if one.kind is kind)
    flags = {option.name for option in flag_options(group)}
    assert flags == flag_module._fields(kind).keys() - NO_FLAG[kind]


@pytest.mark.parametrize("command", GROUPS)
def test_the_help_shows_flags_with_defaults_and_bounds(command: str) -> None:
    text = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    for group in GROUPS[command]:
        section = re.split(rf"\n{group.title}:\n", text)[1]
        for option in flag_options(group, ("model",)):
            assert all(name in section for name in (*option.opts, *option.secondary_opts))
    if command == "serve":
        words = " ".join(text.split())
        assert "Port to listen on; 0: the system chooses. [default: 8000; >=0, <=65535]" in words
        assert "[env var: DRAFTLINE_API_KEY]" in words
        assert "<auto|float32|bfloat16|float16>" in words


def test_a_flag_wins_over_the_file_and_one_that_is_not_given_changes_nothing(
    tmp_path: Path, ran: dict[str, Any]
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "model: m\ndtype: float32\nblock_size: 8\nenforce_eager: true\n"
        "server: {port: 1, host: h, cors_allow_origins: [a], ignore_unknown_fields: true}\n"
    )
    arguments = ["serve", "--config", str(file), "--dtype", "bfloat16", "--port", "2"]
    arguments += ["--no-ignore-unknown-fields", "--cors-allow-origin", "b"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert ran["settings"] == {
        "model": "m", "dtype": "bfloat16", "block_size": 8, "enforce_eager": True,
        "server": {
            "port": 2, "host": "h", "cors_allow_origins": ("b",), "ignore_unknown_fields": False
        },
    }  # fmt: skip
    args = build_serve_args(ran["settings"])
    assert (args.engine.block_size, args.server.port) == (8, 2)


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        ("-pp 2", "pipeline_parallel_size", 2),
        ("--pipeline-parallel-size 2", "pipeline_parallel_size", 2),
        ("--compile off", "compile", "off"),
        ("--enforce-eager", "enforce_eager", True),
        ("--trace-steps steps.jsonl", "trace_steps", Path("steps.jsonl").absolute()),
        ("--api-key a --api-key b", "server.api_key_sha256", (key_digest("a"), key_digest("b"))),
        ("--cors-allow-origin a", "server.cors_allow_origins", ("a",)),
        ("--request-timeout 3", "server.request_timeout_s", 3.0),
        ("--request-timeout-s 3", "server.request_timeout_s", 3.0),
        ("--drain-timeout 3", "server.drain_timeout_s", 3.0),
        ("--allow-unauthenticated", "server.allow_unauthenticated", True),
        ("--ignore-unknown-fields", "server.ignore_unknown_fields", True),
        ("--trust-request-chat-template", "server.trust_request_chat_template", True),
    ],
)
def test_spellings(arguments: str, path: str, value: object, ran: dict[str, Any]) -> None:
    result = runner.invoke(app, ["serve", "m", *arguments.split()])
    assert result.exit_code == 0, result.output
    args = build_serve_args(ran["settings"])
    section, _, name = path.rpartition(".")
    assert getattr(args.server if section else args.engine, name) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--compile on", "'--compile': 'on' was removed; use auto"),
        ("--compile=on", "'--compile': 'on' was removed; use auto"),
        ("--head-features sums", "'--head-features': was removed; leave it out"),
        (
            "--stage-transport compiled_graph",
            "'--stage-transport': 'compiled_graph' was removed; leave stage_transport out",
        ),
    ],
)
def test_a_value_that_was_removed_is_refused_by_what_to_use(
    arguments: str, message: str, ran: dict[str, Any], run: Run
) -> None:
    code, output = run("serve", "demo", *arguments.split())
    assert code == 2
    assert message in " ".join(output.split())
    assert not ran


def test_a_flag_of_another_server_is_not_taken_for_a_drafter_s_option(
    ran: dict[str, Any], run: Run
) -> None:
    code, output = run("serve", "demo", "--chat-template", "chat.jinja")
    assert code == 2
    assert "No such option" in output
    assert not ran


def test_keys_come_from_the_environment_where_no_flag_gives_them(ran: dict[str, Any]) -> None:
    variable = {"DRAFTLINE_API_KEY": "a b"}
    runner.invoke(app, ["serve"], env=variable)
    assert ran["settings"]["server"] == {"api_keys": ("a", "b")}
    runner.invoke(app, ["serve", "--api-key", "c"], env=variable)
    assert ran["settings"]["server"] == {"api_keys": ("c",)}
    runner.invoke(app, ["lossless", "--base-url", "http://h"], env=variable)
    assert ran["job"].api_key == "a b"


def test_bench_has_one_request_at_a_time_unless_a_rate_is_given(ran: dict[str, Any]) -> None:
    loads = []
    for arguments in ([], ["--request-rate", "4", "--seed", "7"], ["--concurrency", "3"]):
        assert runner.invoke(app, ["bench", "demo", *arguments]).exit_code == 0
        load = ran["job"].load
        loads.append((load.concurrency, load.request_rate, load.seed))
    assert loads == [(1, None, 0), (None, 4.0, 7), (3, None, 0)]


@pytest.mark.parametrize("command", ["bench", "lossless"])
def test_a_server_takes_no_settings_of_an_engine(command: str, ran: dict[str, Any]) -> None:
    server = [command, "m", "--base-url", "http://h"]
    assert runner.invoke(app, server).exit_code == 0
    assert ran["settings"] == {}
    assert ran["job"].model == "m"
    result = runner.invoke(app, [*server, "--dtype", "float32"])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.field == "base-url"


def test_generate_takes_the_settings_of_an_engine_in_this_process(ran: dict[str, Any]) -> None:
    arguments = ["generate", "x", "--model", "m", "--dtype", "float32", "-pp", "2"]
    assert runner.invoke(app, arguments).exit_code == 0
    assert ran["settings"] == {"model": "m", "dtype": "float32", "pipeline_parallel_size": 2}
    assert runner.invoke(app, ["generate", "x", "--backend", "ray"]).exit_code == 2


def test_the_list_of_commands_waits_for_no_settings() -> None:
    code = (
        "import sys; from draftline.deploy.cli.main import main\n"
        "sys.argv = ['draftline', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('pydantic', 'numpy', 'torch', 'yaml') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert run.stdout.decode().splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", ["draftline", "draftline.deploy.cli.main"])
def test_the_command_is_a_module(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    run = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert run.stdout.decode() == f"draftline {__version__}\n"
