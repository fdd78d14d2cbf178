"""llama.cpp's library on the same weights, in a process of its own Python (`llama_worker.py`)."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

from .gguf_file import write_checkpoint

WORKER = Path(__file__).parent / "llama_worker.py"
HOW_TO = (
    "llama.cpp is left out. To compare: python -m venv FOLDER; CMAKE_ARGS=-DGGML_NATIVE=ON "
    "FOLDER/bin/pip install llama-cpp-python; then --llama-python FOLDER/bin/python"
)


class LlamaPeer:
    """A Llama checkpoint of unsharded float weights, served by llama.cpp on so many threads."""

    def __init__(self, python: Path, checkpoint: Path, threads: int = 1) -> None:
        self._folder = tempfile.TemporaryDirectory()
        model = Path(self._folder.name) / "model.gguf"
        write_checkpoint(checkpoint, model)
        self._process = subprocess.Popen(
            [str(python), str(WORKER), str(model), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.communicate(timeout=60)
        self._folder.cleanup()

    def pass_seconds(self, context: int, rows: int) -> float:
        """One pass of `rows` tokens behind `context` cached ones."""
        return self._ask(do="pass", context=context, rows=rows)["seconds"]

    def decode(self, prompt: list[int], tokens: int, lookup: int) -> tuple[float, list[int]]:
        """Seconds and ids of a greedy answer; `lookup` tokens a draft by prompt lookup, or 0."""
        answer = self._ask(do="decode", prompt=prompt, tokens=tokens, lookup=lookup)
        return answer["seconds"], answer["ids"]

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the llama.cpp worker ended; its error stands above")
        return json.loads(line)
