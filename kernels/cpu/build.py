"""Builds draftline's CPU kernels with the machine's C++ compiler, once for each version."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...core.errors import ConfigError
from ...core.progress import Progress, unseen

HERE = Path(__file__).parent / "source"
SOURCES = sorted(HERE.glob("*.cpp"))
HEADERS = sorted(HERE.glob("*.h"))
FIX = "or use compile: off"
# Compilers at a time, each of which takes half a gigabyte of memory.
MOST_COMPILERS = 4


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vector units that the kernels are built for: `count` vectors of `lanes` floats make a
    panel. `has_byte_dots`: one instruction multiplies bytes and adds four products a lane."""

    lanes: int
    count: int
    flags: tuple[str, ...] = ()
    has_byte_dots: bool = False

    @property
    def panel(self) -> int:
        """Columns of a panel."""
        return self.lanes * self.count

    @property
    def widening(self) -> Vectors:
        """The same without dot products of bytes: integer codes are widened."""
        return replace(self, has_byte_dots=False)


# By torch's name of the CPU capability (the variable ATEN_CPU_CAPABILITY overrides it). Explicit
# instead of `native`, because machines with a shared home share the cache.
AVX512_FLAGS = "-mavx512f", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"
BY_CAPABILITY = {
    "AVX512": Vectors(16, 4, AVX512_FLAGS),
    "AVX2": Vectors(8, 2, ("-mavx2", "-mfma")),
}
AVX512_VNNI = Vectors(16, 4, (*AVX512_FLAGS, "-mavx512bw", "-mavx512vnni"), has_byte_dots=True)
OTHER = Vectors(4, 2)


def vectors() -> Vectors:
    """The number and width of vectors that this processor's build uses."""
    capability = torch.backends.cpu.get_cpu_capability()
    # torch has no public name of this.
    if capability == "AVX512" and torch.cpu._is_vnni_supported():  # noqa: SLF001
        return AVX512_VNNI
    return BY_CAPABILITY.get(capability, OTHER)


def library_path(folder: Path) -> Path:
    """The path of the cached library for these sources, this torch and this processor."""
    texts = [source.read_text() for source in (*SOURCES, *HEADERS)]
    key = hashlib.sha256(repr((_arguments(), torch.__version__, texts)).encode())
    return folder / f"cpu_ops-{key.hexdigest()[:16]}.so"


def are_loaded() -> bool:
    """Whether `torch.ops.draftline` has the CPU kernels."""
    return hasattr(torch.ops.draftline, "packed_linear")


def ensure_built(folder: Path, progress: Progress = unseen) -> Path:
    """The library in `folder`; compiles it first if it is missing. Raises as `build`."""
    library = library_path(folder)
    if not library.exists():
        # Nothing else shows why a first start takes a minute.
        label = "compiling CPU kernels, once for this version"
        with progress(label, total=1, unit="libraries") as work:
            build(library)
            work.advance()
    return library


def load_cpu_ops(folder: Path, progress: Progress = unseen) -> None:
    """Register `torch.ops.draftline`; builds the library in `folder` if it is missing.

    Raises `ConfigError` (`compile`) if the compiler is missing or fails.
    """
    if are_loaded():
        return
    torch.ops.load_library(ensure_built(folder, progress))


def find_compiler() -> str:
    """The C++ compiler: CXX, or g++. Raises `ConfigError` (`compile`) where there is none."""
    wanted = os.environ.get("CXX", "g++")
    compiler = shutil.which(wanted)
    if compiler is None:
        raise ConfigError(
            "compile", f"needs a C++ compiler, and there is no {wanted}; install it "
            f"(Debian, Ubuntu: apt install g++), name another one in CXX, {FIX}",
        )  # fmt: skip
    return compiler


def build(library: Path) -> None:
    """Compile the sources to `library`. Raises `ConfigError` (`compile`)."""
    command = [find_compiler(), *_arguments()]
    # Stages that start together may build it twice; each writes the same file.
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            objects = [f"{scratch}/{source.stem}.o" for source in SOURCES]
            jobs = [
                [*command, *_includes(), "-c", str(source), "-o", made]
                for source, made in zip(SOURCES, objects, strict=True)
            ]
            with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_COMPILERS)) as pool:
                list(pool.map(_compile, jobs))
            linked = Path(scratch) / library.name
            _compile([*command, "-shared", *objects, *_libraries(), "-o", str(linked)])
            linked.replace(library)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError("compile", f"failed in {library.parent}: {reason}; {FIX}") from error


def _compile(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line]
        reason = (lines or result.stderr.splitlines() or ["no message"])[0]
        raise ConfigError("compile", f"failed: {command[0]}: {reason}; mend it, {FIX}")


def _arguments() -> list[str]:
    wanted = vectors()
    return [
        # Without contraction: `kernels/cpu/source/vectors.h` fuses operations explicitly.
        "-O3", "-std=c++20", "-ffp-contract=off", "-fopenmp", "-fPIC", *wanted.flags,
        f"-DDRAFTLINE_LANES={wanted.lanes}", f"-DDRAFTLINE_VECTORS={wanted.count}",
    ]  # fmt: skip


def _includes() -> list[str]:
    home = Path(torch.__file__).parent / "include"
    return [f"-I{home}", f"-I{home / 'torch/csrc/api/include'}"]


def _libraries() -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
