"""The source files that the demo models train on, and the held-out ones.

The corpus is the Python standard library of the interpreter that runs this, plus the sources of a
fixed list of permissively licensed dependencies that are installed beside it.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Distribution folder -> licence, as its metadata states it.
DEPENDENCIES = {
    "click": "BSD-3-Clause",
    "httpx": "BSD-3-Clause",
    "jinja2": "BSD-3-Clause",
    "requests": "Apache-2.0",
    "rich": "MIT",
    "starlette": "BSD-3-Clause",
    "typer": "MIT",
    "uvicorn": "BSD-3-Clause",
}
# Further packages for the later part of a run: a model that reads the few above twice memorises
# their names.
MORE_DEPENDENCIES = {
    "_pytest": "MIT",
    "accelerate": "Apache-2.0",
    "aiohttp": "Apache-2.0 AND MIT",
    "anyio": "MIT",
    "fastapi": "MIT",
    "fsspec": "BSD-3-Clause",
    "huggingface_hub": "Apache-2.0",
    "networkx": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
    "packaging": "Apache-2.0 OR BSD-2-Clause",
    "pydantic": "MIT",
    "redis": "MIT",
    "setuptools": "MIT",
    "urllib3": "MIT",
}
# Tables, vendored copies and tests do not help a small model with typical requests.
SKIPPED_FOLDERS = {
    "__pycache__", "_pyrepl", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
# Other packages contain copies of these (typer's `_click`, setuptools' backports), which would leak
# the held-out text. They are not trained on either.
COPIED_ELSEWHERE = frozenset({"click/formatting.py", "stdlib/tarfile.py"})
MAX_FILE_BYTES = 200_000
HELD_OUT_LIST = Path(__file__).with_name("held_out.txt")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file; `name` is the same on every machine, such as `stdlib/json/decoder.py`."""

    name: str
    text: str


def held_out_names() -> frozenset[str]:
    """Names of the files that no training run and no bundled retrieval segment may read."""
    lines = HELD_OUT_LIST.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def training_files(*, more: bool = False) -> list[SourceFile]:
    """All training files, sorted by name, without exact duplicates.

    `more` adds those of `MORE_DEPENDENCIES`, as far as they are installed.
    """
    left_out = held_out_names() | COPIED_ELSEWHERE
    names = [*DEPENDENCIES, *MORE_DEPENDENCIES] if more else DEPENDENCIES
    seen: set[bytes] = set()
    files = []
    for file in _all_files(names):
        digest = hashlib.sha256(file.text.encode()).digest()
        if file.name not in left_out and digest not in seen:
            seen.add(digest)
            files.append(file)
    return files


def held_out_files() -> list[SourceFile]:
    """The held-out files that exist beside this interpreter, sorted by name."""
    held_out = held_out_names()
    return [file for file in _all_files(DEPENDENCIES) if file.name in held_out]


def _all_files(dependencies: Iterable[str]) -> Iterator[SourceFile]:
    paths = sysconfig.get_paths()
    roots = {"stdlib": Path(paths["stdlib"])}
    roots |= {name: Path(paths["purelib"]) / name for name in sorted(dependencies)}
    for label, root in roots.items():
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if SKIPPED_FOLDERS.isdisjoint(relative.parts) and _is_wanted(path):
                text = path.read_text(encoding="utf-8", errors="replace")
                yield SourceFile(f"{label}/{relative.as_posix()}", text)


def _is_wanted(path: Path) -> bool:
    return 0 < path.stat().st_size <= MAX_FILE_BYTES
