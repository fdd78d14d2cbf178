"""Every package says what it is and where to begin."""

from __future__ import annotations

import ast
from pathlib import Path

import draftline

ROOT = Path(draftline.__file__).parent
PACKAGES = (
    "actors", "cluster", "core", "deploy", "drafters", "kernels", "measure", "models",
    "retrieval_store",
)  # fmt: skip


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_every_package_says_what_it_is_and_where_to_begin() -> None:
    for path in sources():
        if path.name != "__init__.py" or path.parent.name == "kernels":
            continue
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        assert len(text.splitlines()) >= 3, path
        named = [word for word in text.split("`") if word.endswith((".py", "/"))]
        assert all((path.parent / name).exists() or (ROOT / name).exists() for name in named), path
