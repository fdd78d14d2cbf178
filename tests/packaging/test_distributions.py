"""The sdist and the wheel hold what a user needs, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.tools.tree_copy import ROOT, copy_tree

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("distributions")]

SHIPPED = (
    "__init__.py",
    "py.typed",
    "core/proposals.py",
    "deploy/assets/prompts/held_out.jsonl",
    "training/held_out.txt",
)
NEVER_SHIPPED = ("tests/", "training/runs/", "docs/", ".venv/", ".ci/", "build/")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both distributions, built offline from a copy of the tree."""
    folder = tmp_path_factory.mktemp("distributions")
    tree = copy_tree(folder / "tree")
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")],
        cwd=tree, capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel_names(built: Path) -> frozenset[str]:
    """Paths in the wheel, below the package."""
    [path] = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        return frozenset(name.removeprefix("draftline/") for name in wheel.namelist())


@pytest.fixture(scope="module")
def sdist_names(built: Path) -> frozenset[str]:
    """Paths in the sdist, below its top folder."""
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        return frozenset(name.partition("/")[2] for name in sdist.getnames())


@pytest.mark.parametrize("name", SHIPPED)
def test_what_users_need_is_shipped(
    name: str, wheel_names: frozenset[str], sdist_names: frozenset[str]
) -> None:
    assert name in wheel_names
    assert name in sdist_names


@pytest.mark.parametrize(
    "pattern",
    [
        "deploy/assets/models/**/*",
        "kernels/**/*.cpp",
        "kernels/**/*.h",
        "deploy/*.yaml",
    ],
)
def test_data_beside_the_code_is_shipped(
    pattern: str, wheel_names: frozenset[str], sdist_names: frozenset[str]
) -> None:
    files = (path for path in ROOT.glob(pattern) if path.is_file() and path.name != "lock")
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    assert expected, f"the tree holds no {pattern}"
    assert expected <= wheel_names
    assert expected <= sdist_names


def test_every_python_file_of_the_package_is_in_the_wheel(wheel_names: frozenset[str]) -> None:
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ROOT.glob("*/__init__.py")
        for path in package.parent.rglob("*.py")
        if path.relative_to(ROOT).parts[:2] != ("training", "runs")
    }
    assert sources <= wheel_names


@pytest.mark.parametrize("prefix", NEVER_SHIPPED)
def test_what_is_only_for_developers_stays_out(
    prefix: str, wheel_names: frozenset[str], sdist_names: frozenset[str]
) -> None:
    assert not [name for name in wheel_names | sdist_names if name.startswith(prefix)]


def test_the_wheel_carries_its_licences(wheel_names: frozenset[str]) -> None:
    for name in ("LICENSE", "NOTICE"):
        assert any(path.endswith(f".dist-info/licenses/{name}") for path in wheel_names)
