"""Builds draftline's own CPU operators with the machine's C++ compiler, once for each version."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import ConfigError

SOURCES = [Path(__file__).parent / name for name in ("attention.cpp", "linear.cpp")]
FIX = "or use compile: off"


@dataclass(frozen=True, slots=True)
class Vectors:
    """What the operators are built for: `count` vectors of `lanes` floats make a panel."""

    lanes: int
    count: int
    flags: tuple[str, ...] = ()

    @property
    def panel(self) -> int:
        """Columns of a panel."""
        return self.lanes * self.count


# By torch's name of what the processor can do. Named instead of `native`, because machines that
# share a home share the cache.
BY_CAPABILITY = {
    "AVX512": Vectors(16, 4, ("-mavx512f", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")),
    "AVX2": Vectors(8, 2, ("-mavx2", "-mfma")),
}
OTHER = Vectors(4, 2)


def vectors() -> Vectors:
    """The number and width of vectors that this processor's build uses."""
    return BY_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), OTHER)


def load_cpu_ops(folder: Path) -> None:
    """Register `torch.ops.draftline`, built in `folder` where it is not there yet.

    Raises `ConfigError` (`compile`) where the compiler or Python's headers are missing or fail.
    """
    if hasattr(torch.ops.draftline, "packed_linear"):
        return
    command = [_compiler(), *_arguments()]
    sources = [source.read_text() for source in SOURCES]
    key = hashlib.sha256(repr((command, torch.__version__, sources)).encode())
    library = folder / f"cpu_ops-{key.hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _build(command, library)
    torch.ops.load_library(library)
    torch.library.register_fake("draftline::packed_linear", _product)
    torch.library.register_fake("draftline::attend", _attention)


def _product(x: Tensor, _weight: Tensor, outputs: int) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


def _attention(heads: Tensor, _layer: int, num_heads: int, *_options: object) -> Tensor:
    return heads.new_empty(heads.shape[0], num_heads * heads.shape[2])


def _compiler() -> str:
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        raise ConfigError(
            "compile", f"on needs Python's C headers, and there is no {headers}; install them "
            f"(Debian, Ubuntu: apt install python3-dev) {FIX}",
        )  # fmt: skip
    wanted = os.environ.get("CXX", "g++")
    compiler = shutil.which(wanted)
    if compiler is None:
        raise ConfigError(
            "compile", f"on needs a C++ compiler, and there is no {wanted}; install it "
            f"(Debian, Ubuntu: apt install g++), name another one in CXX, {FIX}",
        )  # fmt: skip
    return compiler


def _arguments() -> list[str]:
    wanted = vectors()
    home = Path(torch.__file__).parent
    return [
        "-O3", "-std=c++20", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC", *wanted.flags,
        f"-DDRAFTLINE_LANES={wanted.lanes}", f"-DDRAFTLINE_VECTORS={wanted.count}",
        f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}",
        *map(str, SOURCES), f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


def _build(command: list[str], library: Path) -> None:
    # Stages that start together may build it twice; the last one in puts the same file there.
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        result = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, check=False
        )
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line]
            reason = (lines or result.stderr.splitlines() or ["no message"])[0]
            raise ConfigError("compile", f"on failed: {command[0]}: {reason}; mend it, {FIX}")
        made.replace(library)
