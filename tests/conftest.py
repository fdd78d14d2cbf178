"""Every test: one torch thread; and unit tests that cannot reach beyond their process.

A test in one of `UNIT_AREAS` that carries none of the markers `cluster`, `redis` and `net` cannot
start Ray, connect or bind a socket, make a gRPC channel or server, or open a Redis connection.
Fixtures of a wider scope than the test (a server for a whole module) are not guarded.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import settings

# Before torch is imported, and inherited by every process that a test starts: threads of several
# processes on few cores slow one another down many times over.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"


def device_answers() -> bool:
    """Whether the driver counts a device: a container may have its files and none of it.

    By NVML, which leaves CUDA to whoever uses it: once begun, it does not survive a fork.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        return not (
            nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) or not count.value
        )
    except (OSError, AttributeError):
        return False


# Triton decides at its import whether it compiles kernels or interprets them.
if not device_answers():
    os.environ["TRITON_INTERPRET"] = "1"

# Time is not what the properties are about. They are based on hypothesis's default, which repeats
# the same examples in every run with CI set. `quick` is for `make test`.
settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("whole", deadline=None)

UNIT_AREAS = frozenset(
    {
        "benchmarks",
        "measure",
        "core",
        "drafters",
        "kernels",
        "models",
        "retrieval_store",
        "training",
        "unit_guard",
    }
)
OUTSIDE_MARKERS = ("cluster", "redis", "net")
# Why tests may be skipped in continuous integration, which sets `NO_AVOIDABLE_SKIPS`: what no
# package brings.
UNAVOIDABLE = (
    "no CUDA device", "needs two GPUs", "no systemd", "Chromium cannot be installed",
    "Prometheus cannot be installed",
)  # fmt: skip
# One Ray at a time; and a process builds the C++ code but once.
ONE_WORKER = ("cluster", "compiler")
TESTS = Path(__file__).parent

# Module -> what reaches outside. gRPC opens its sockets in C++, where no patch of `socket` sees it.
GUARDED = {
    "ray": ("init",),
    "grpc": ("insecure_channel", "secure_channel", "server"),
    "grpc.aio": ("insecure_channel", "secure_channel", "server"),
    "redis.connection": ("AbstractConnection.connect",),
    "redis.asyncio.connection": ("AbstractConnection.connect",),
}


def pytest_configure(config: pytest.Config) -> None:
    """Choose the profile before any test reads it; `--hypothesis-profile` goes before this one."""
    settings.load_profile("quick" if "not full" in config.option.markexpr else "whole")


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Some kinds of tests stay in one xdist worker; some need a GPU or a program.

    So do tests that share what a fixture made for their file: each worker would make it anew.
    """
    for item in items:
        for kind in ONE_WORKER:
            if item.get_closest_marker(kind):
                item.add_marker(pytest.mark.xdist_group(kind))
        if not item.get_closest_marker("xdist_group") and _shares_fixtures(item):
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(TESTS).as_posix()))
        for marker, name in (("browser", "Chromium"), ("prometheus", "Prometheus")):
            if item.get_closest_marker(marker) and not _is_installed(marker):
                was_tried = (TESTS.parent / "build" / f"setup-{marker}.log").exists()
                reason = f"{name} cannot be installed" if was_tried else f"no {name}: make {marker}"
                item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a test was skipped that need not have been, if `NO_AVOIDABLE_SKIPS` is set."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("NO_AVOIDABLE_SKIPS"):
        return
    reasons = {report.longrepr[2] for report in reporter.stats.get("skipped", ())}
    reasons = {reason.removeprefix("Skipped: ") for reason in reasons}
    if avoidable := sorted(one for one in reasons if not one.startswith(UNAVOIDABLE)):
        reporter.ensure_newline()
        reporter.write_line(f"skips that are avoidable here: {'; '.join(avoidable)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def torch_single_thread() -> None:
    """One thread for torch, also where something imported it before this file was read."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Build the CPU kernels, so that engines run them in every test, and none waits for them."""
    # Some tests run in a copy of the tree without its upper packages.
    if "torch" not in sys.modules or find_spec("draftline.models") is None:
        return
    from draftline.core.errors import ConfigError
    from draftline.kernels.cpu.build import build, find_compiler, library_path
    from draftline.models.stage.options import StageOptions

    library = library_path(Path(StageOptions().compile_cache).expanduser())
    try:
        find_compiler()
    except ConfigError:
        return
    if not library.exists():
        build(library)


@pytest.fixture(autouse=True)
def unit_tests_stay_inside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every way out of the process raise in unit tests."""
    if _area(request.path) not in UNIT_AREAS or any(
        request.node.get_closest_marker(name) for name in OUTSIDE_MARKERS
    ):
        return
    for method in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, method, _refuse(f"socket.{method}"))
    for module_name, targets in GUARDED.items():
        # What no one has imported yet need not be imported for this; the sockets are guarded.
        if module := sys.modules.get(module_name):
            for target in targets:
                owner, name = _resolve(module, target)
                monkeypatch.setattr(owner, name, _refuse(f"{module_name}.{target}"))


@pytest.fixture(autouse=True)
def best_effort_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine goes on over an error in what makes it fast; in a test it is an error as any."""
    from draftline.core.errors import BestEffort

    monkeypatch.setattr(BestEffort, "__exit__", lambda *_: None)


def _shares_fixtures(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    found = item._fixtureinfo.name2fixturedefs.values()
    return any(fixtures[-1].scope in ("module", "package") for fixtures in found)


def _is_installed(marker: str) -> bool:
    programs = {"browser": ("chromium", "chromium-browser"), "prometheus": ("prometheus",)}
    return any(map(shutil.which, programs[marker]))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _area(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


def _resolve(module: Any, target: str) -> tuple[Any, str]:
    *parents, name = target.split(".")
    for parent in parents:
        module = getattr(module, parent)
    return module, name


def _refuse(what: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise AssertionError(
            f"{what} in a unit test: mark the test `cluster`, `redis` or `net`, or inject a fake"
        )

    return refuse
