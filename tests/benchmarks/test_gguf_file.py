"""Model files for llama.cpp; tests/models/load/test_gguf_file.py reads them back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from draftline.benchmarks.peers.gguf_file import reordered, write_checkpoint
from draftline.core.errors import DraftlineError
from draftline.models.load.bundled import demo_path
from gguf import GGMLQuantizationType, GGUFReader


def test_halves_of_heads_are_interleaved() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert reordered(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    shutil.copytree(demo_path("demo-drafter"), tmp_path / "other")
    words = {"model": {"type": "Unigram"}, "pre_tokenizer": {"type": "ByteLevel"}}
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(DraftlineError, match="byte-level BPE"):
        write_checkpoint(tmp_path / "other", tmp_path / "other.gguf")


def test_a_tokenizer_that_splits_digits_is_written_as_smollm(tmp_path: Path) -> None:
    folder = tmp_path / "smollm"
    shutil.copytree(demo_path("demo-drafter"), folder)
    words = json.loads((folder / "tokenizer.json").read_text())
    digits = {"type": "Digits", "individual_digits": True}
    words["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [digits, words["pre_tokenizer"]],
    }
    (folder / "tokenizer.json").write_text(json.dumps(words))
    write_checkpoint(folder, tmp_path / "smollm.gguf", GGMLQuantizationType.Q4_1)
    fields = GGUFReader(tmp_path / "smollm.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert fields["tokenizer.ggml.bos_token_id"].contents() == 0
