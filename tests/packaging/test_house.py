"""The house stays readable: few files a folder, short files, short functions."""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from pathlib import Path

import draftline

ROOT = Path(draftline.__file__).parent
PACKAGES = (
    "actors", "cluster", "core", "deploy", "drafters", "kernels", "measure", "models",
    "retrieval_store",
)  # fmt: skip
MAX_FILES = 12
MAX_LINES = 400
MAX_FUNCTION_LINES = 60


def sources() -> list[Path]:
    return [
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not path.name.endswith("_pb2.py")
    ]


def test_folders_hold_few_files() -> None:
    counts = Counter(path.parent for path in sources() if path.name != "__init__.py")
    assert len(counts) > 40
    assert not {str(folder): count for folder, count in counts.items() if count > MAX_FILES}


def test_files_are_neither_scraps_nor_scrolls() -> None:
    lengths = {
        str(path): len(path.read_text("utf-8").splitlines())
        for path in sources()
        if path.name != "__init__.py"
    }
    assert not {path: length for path, length in lengths.items() if length > MAX_LINES}
    assert 100 <= statistics.median(lengths.values()) <= 160


def test_functions_are_short() -> None:
    lengths: dict[str, int] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lengths[f"{path}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
    assert statistics.median(lengths.values()) <= 8
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= 20
    assert not {name for name, length in lengths.items() if length > MAX_FUNCTION_LINES}


def test_every_package_says_what_it_is_and_where_to_begin() -> None:
    for path in sources():
        if path.name != "__init__.py" or path.parent.name == "kernels":
            continue
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        assert len(text.splitlines()) >= 3, path
        named = [word for word in text.split("`") if word.endswith((".py", "/"))]
        assert all((path.parent / name).exists() or (ROOT / name).exists() for name in named), path
