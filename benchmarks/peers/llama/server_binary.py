"""llama.cpp's own server: a binary that someone built."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

# The source distribution of llama-cpp-python holds llama.cpp whole.
HOW_TO = (
    "llama.cpp's server is left out. To compare: pip download --no-deps --no-binary :all: "
    "llama-cpp-python; tar xf llama_cpp_python-*.tar.gz; cmake -S "
    "llama_cpp_python-*/vendor/llama.cpp -B build/llama -DCMAKE_BUILD_TYPE=Release "
    "-DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF; cmake --build build/llama --target "
    "llama-server; then --llama-server build/llama/bin/llama-server"
)


@dataclass(frozen=True, slots=True)
class LlamaBinary:
    """`llama-server` at a path."""

    path: Path

    def version(self) -> str | None:
        """What it says of itself; None where it is not there or does not run."""
        try:
            found = subprocess.run(
                [self.path, "--version"], capture_output=True, check=False, text=True
            )
        except OSError:
            return None
        lines = [*found.stdout.splitlines(), *found.stderr.splitlines()]
        told = [line.partition(":")[2].strip() for line in lines if line.startswith("version:")]
        return told[0] if found.returncode == 0 and told else None
