"""The algorithm does not need the distribution: without it, unit tests and example still pass.

In a copy of the tree, this deletes `actors/`, the code of `deploy/`, every file of `cluster/` and
`retrieval_store/` that imports Ray, gRPC or Redis, and the tests of what was deleted.
In the copy, those libraries cannot be imported either.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.tools.tree_copy import copy_tree

DISTRIBUTION = ("ray", "grpc", "redis")
ALGORITHM = ("core", "kernels", "models", "drafters", "training")
UNIT_AREAS = ("core", "drafters", "retrieval_store")
# Read by every interpreter that has the copy on its path, those that a test starts included. The
# finder of an editable install must go: it would find deleted modules in the working tree.
SITE = f"""
import sys
from importlib.machinery import PathFinder

class WithoutDistribution(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = any(name == gone or name.startswith(gone + ".") for gone in {DISTRIBUTION!r})
        return None if absent else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [
    WithoutDistribution if finder is PathFinder else finder
    for finder in sys.meta_path
    if "__editable__" not in getattr(finder, "__module__", "")
]
"""

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("bare_tree")]


@pytest.fixture(scope="module")
def bare_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy after the deletions: a package `draftline` in a folder of its own."""
    tree = copy_tree(tmp_path_factory.mktemp("bare") / "draftline")
    (tree.parent / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    gone = {*DISTRIBUTION, "draftline.actors", "draftline.deploy"}
    shutil.rmtree(tree / "actors")
    for path in (tree / "deploy").rglob("*.py"):
        path.unlink()
    for files in (
        [*tree.glob("cluster/**/*.py"), *tree.glob("retrieval_store/**/*.py")],
        tree.glob("tests/support/**/*.py"),
        tree.glob("tests/**/*.py"),
    ):
        gone |= _delete_importers(tree, files, gone)
    return tree


# Loops are compiled anew in the copy, which takes minutes.
@pytest.mark.full
@pytest.mark.parametrize(
    "names",
    [pytest.param(UNIT_AREAS, marks=pytest.mark.timeout(1200)), ("models",)],
    ids=", ".join,
)
def test_the_unit_tests_pass(bare_tree: Path, names: tuple[str, ...]) -> None:
    areas = [bare_tree / "tests" / area for area in names]
    for area in areas:
        assert list(area.rglob("test_*.py")), f"no test of {area.name} is free of the distribution"
    marked = "not (cluster or redis or net or gpu or compiler or full)"
    # What is imported differs from the run in the whole tree; what comes out does not.
    short = ("--hypothesis-profile=quick", "-p", "support.tools.first_cases")
    _run(bare_tree, "-m", "pytest", "-q", "-x", *short, "-m", marked, *map(str, areas))


def test_the_algorithm_imports_nothing_that_is_gone(bare_tree: Path) -> None:
    """Not even in a function that no test calls."""
    paths = [path for name in ALGORITHM for path in (bare_tree / name).rglob("*.py")]
    assert len(paths) > len(ALGORITHM)
    gone = {*DISTRIBUTION, "draftline.actors", "draftline.deploy", "draftline.cluster"}
    for path in paths:
        assert not [name for name in _imports(bare_tree, path) if _is_gone(name, gone)], path


def test_the_example_runs(bare_tree: Path) -> None:
    """Without numba, too: loops compiled anew in the copy would take ten times as long."""
    example = bare_tree / "examples" / "one_process.py"
    code = (
        "import runpy, sys; sys.modules['numba'] = None; "
        f"runpy.run_path({str(example)!r}, run_name='__main__')"
    )
    said = _run(bare_tree, "-c", code)
    assert "same tokens as plain decoding: True" in said


def test_the_deletions_are_real(bare_tree: Path) -> None:
    left = {path.name for path in bare_tree.glob("cluster/**/*.py")}
    assert {"config.py", "stage_spec.py", "local_pipeline.py"} <= left
    assert not [name for name in left if name.startswith("ray_")]
    code = "import importlib.util as u; print([n for n in {!r} if u.find_spec(n)])"
    names = ("ray", "grpc", "redis", "draftline.actors")
    where = "import draftline; print(draftline.__file__)"
    assert _run(bare_tree, "-c", code.format(names)).strip() == "[]"
    assert _run(bare_tree, "-c", where).strip() == str(bare_tree / "__init__.py")


def _run(tree: Path, *arguments: str) -> str:
    """Run Python with the copy as the only `draftline`; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=tree.parent, capture_output=True, check=False, text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(map(str, (tree.parent, tree / "tests")))},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
    return result.stdout


def _delete_importers(tree: Path, files: Iterable[Path], gone: set[str]) -> set[str]:
    """Delete the files that import a module of `gone`, and those that import these.

    Returns the names of their modules.
    """
    imported = {path: set(_imports(tree, path)) for path in files}
    deleted: set[str] = set()
    while doomed := [
        path for path, names in imported.items() if any(_is_gone(n, gone | deleted) for n in names)
    ]:
        for path in doomed:
            path.unlink()
            del imported[path]
            deleted.add(_module(tree, path))
    return deleted


def _is_gone(name: str, gone: set[str]) -> bool:
    parts = name.split(".")
    ancestors = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return bool(ancestors & gone)


def _imports(tree: Path, path: Path) -> Iterator[str]:
    """Full names of everything that a file imports, at its top or inside functions."""
    package = _module(tree, path).split(".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: -node.level] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def _module(tree: Path, path: Path) -> str:
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "tests" else ("draftline", *parts))
