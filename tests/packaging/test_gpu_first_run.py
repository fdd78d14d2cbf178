"""What `CONTRIBUTING.md` asks for can be run: its commands, flags, parts, files and tests."""

from __future__ import annotations

import configparser
import ctypes
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from types import ModuleType

import pytest
from draftline.benchmarks.gpu.__main__ import main as measure
from draftline.benchmarks.gpu.parts import PARTS
from support.tools.pages import sections
from support.tools.tree_copy import ROOT

PAGE = sections(ROOT / "CONTRIBUTING.md")["A first run on a GPU"]
BENCHMARK = "-m draftline.benchmarks.gpu"
PLUGINS = ("asyncio", "timeout", "xdist")


def commands() -> list[str]:
    """The page's command lines, without comments."""
    text = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
    lines = text.replace("\\\n", " ").splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line.strip()]


def test_runs_of_the_benchmark_have_flags_and_parts_that_there_are() -> None:
    runs = [shlex.split(line.partition(BENCHMARK)[2]) for line in commands() if BENCHMARK in line]
    known = {f"--{name.replace('_', '-')}" for name in inspect.signature(measure).parameters}
    parts: set[str] = set()
    for run in runs:
        flags = dict(zip(run[::2], run[1::2], strict=True))
        assert flags.keys() <= known
        parts.update(flags.get("--parts", "").split(","))
    assert parts - {""} <= PARTS.keys()
    assert parts | {"rates"} >= PARTS.keys(), "a part has no line of its own"


def test_folders_of_tests_hold_tests_of_gpus() -> None:
    folders = [
        folder
        for line in commands()
        if "pytest" in line
        for folder in shlex.split(line)
        if folder.startswith("tests/") and not folder.endswith(".ini")
    ]
    assert len(folders) >= 4
    for folder in folders:
        files = [ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py")
        assert any("mark.gpu" in file.read_text() for file in files), folder


def test_the_ini_of_gpus_knows_the_marks_of_the_project() -> None:
    ini = configparser.ConfigParser()
    ini.read(ROOT / "tests" / "gpu.ini")
    known = {line.partition(":")[0] for line in ini["pytest"]["markers"].split("\n")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    marks = project["tool"]["pytest"]["ini_options"]["markers"]
    assert {mark.partition(":")[0] for mark in marks} <= known
    assert "strict" not in ini["pytest"]["addopts"]


@pytest.mark.full
def test_tests_of_gpus_are_found_without_plugins() -> None:
    without = [part for name in PLUGINS for part in ("-p", f"no:{name}")]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "tests/gpu.ini", "-m", "gpu", "--collect-only", "-q",
         *without, "tests/kernels", "tests/models", "tests/benchmarks",
         "tests/drafters/heads/test_device_trees.py"],
        cwd=ROOT, capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr
    assert "error" not in result.stdout
    for file in ("test_sampling.py", "test_gpu_path.py", "test_gpu_run.py", "test_device_trees.py"):
        assert file in result.stdout


def test_a_copy_of_the_sources_needs_no_install() -> None:
    code = "import draftline; print(draftline.__file__)"
    result = subprocess.run(
        [ROOT / "scripts" / "from_source.sh", sys.executable, "-c", code],
        cwd="/", capture_output=True, check=True, text=True,
    )  # fmt: skip
    found = result.stdout.strip()
    assert found.endswith("/draftline/__init__.py")
    assert not found.startswith(str(ROOT)), "it is the link's"


class Driver:
    """NVML, which counts so many devices, or does not begin."""

    def __init__(self, devices: int | None) -> None:
        self._devices = devices

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's name
        return int(self._devices is None)

    def nvmlDeviceGetCount_v2(self, count: ctypes.c_uint) -> int:  # noqa: N802 - NVML's name
        count.value = self._devices or 0
        return 0


@pytest.fixture
def conftest(pytestconfig: pytest.Config) -> ModuleType:
    path = str(ROOT / "tests" / "conftest.py")
    plugins = pytestconfig.pluginmanager.get_plugins()
    return next(one for one in plugins if getattr(one, "__file__", None) == path)


@pytest.mark.parametrize(("devices", "answers"), [(None, False), (0, False), (1, True)])
def test_kernels_are_interpreted_where_no_device_answers(
    devices: int | None, answers: bool, conftest: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Driver(devices))
    monkeypatch.setattr(ctypes, "byref", lambda value: value)
    assert conftest.device_answers() is answers


def test_without_a_driver_no_device_answers(
    conftest: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_name: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert conftest.device_answers() is False
