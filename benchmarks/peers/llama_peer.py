"""llama.cpp on the same weights, in a process of its own Python (`llama_worker.py`)."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors.torch import load_file
from transformers import AutoConfig

WORKER = Path(__file__).parent / "llama_worker.py"
HOW_TO = (
    "llama.cpp is left out. To compare: python -m venv FOLDER; CMAKE_ARGS=-DGGML_NATIVE=ON "
    "FOLDER/bin/pip install llama-cpp-python gguf; then --llama-python FOLDER/bin/python"
)


class LlamaPeer:
    """A Llama checkpoint of unsharded float weights, served by llama.cpp on one thread."""

    def __init__(self, python: Path, checkpoint: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        config = AutoConfig.from_pretrained(checkpoint)
        fields = config.to_dict() | {"rope_theta": config.rope_parameters["rope_theta"]}
        (folder / "config.json").write_text(json.dumps(fields, default=str))
        tensors = load_file(checkpoint / "model.safetensors")
        if config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        arrays: dict[str, Any] = {name: tensor.float().numpy() for name, tensor in tensors.items()}
        np.savez(folder / "weights.npz", **arrays)
        names = ("weights.npz", "config.json", "model.gguf")
        self._process = subprocess.Popen(
            [str(python), str(WORKER), *(str(folder / name) for name in names)],
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
