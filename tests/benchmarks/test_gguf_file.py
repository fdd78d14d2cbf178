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


def test_halves_of_heads_are_interleaved() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert reordered(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    shutil.copytree(demo_path("demo-drafter"), tmp_path / "other")
    words = {"model": {"type": "Unigram"}, "pre_tokenizer": {"type": "ByteLevel"}}
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(DraftlineError, match="byte-level BPE"):
        write_checkpoint(tmp_path / "other", tmp_path / "other.gguf")
