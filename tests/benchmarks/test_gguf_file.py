"""Model files for llama.cpp, read back as ggml's `docs/gguf.md` says."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftline.benchmarks.peers.gguf_file import (
    gguf_name,
    reordered,
    tokenizer_values,
    write_checkpoint,
)
from draftline.core.errors import DraftlineError
from draftline.models.load.bundled import demo_path
from safetensors.torch import load_file

FORMATS = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}


class Reader:
    """Values and arrays of a GGUF file of version 3."""

    def __init__(self, path: Path) -> None:
        self._data, self._at = path.read_bytes(), 4
        assert self._data[:4] == b"GGUF"
        version, tensors, values = self._number(4), self._number(10), self._number(10)
        assert version == 3
        self.values = {self._text(): self._value(self._number(4)) for _ in range(values)}
        places = [self._place() for _ in range(tensors)]
        begin = -(-self._at // 32) * 32
        self.arrays: dict[str, np.ndarray] = {}
        for name, shape, offset in places:
            assert offset % 32 == 0
            count = int(np.prod(shape))
            flat = np.frombuffer(self._data, "<f4", count, begin + offset)
            self.arrays[name] = flat.reshape(shape)

    def _number(self, kind: int) -> Any:
        (value,) = struct.unpack_from(FORMATS[kind], self._data, self._at)
        self._at += struct.calcsize(FORMATS[kind])
        return value

    def _text(self) -> str:
        length = self._number(10)
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._text()
        if kind != 9:
            return self._number(kind)
        items = self._number(4)
        return [self._value(items) for _ in range(self._number(10))]

    def _place(self) -> tuple[str, tuple[int, ...], int]:
        name = self._text()
        shape = [self._number(10) for _ in range(self._number(4))]
        assert self._number(4) == 0
        return name, tuple(reversed(shape)), self._number(10)


def test_a_checkpoint_is_written_whole(tmp_path: Path) -> None:
    demo, path = demo_path("demo"), tmp_path / "demo.gguf"
    write_checkpoint(demo, path)
    found, config = Reader(path), json.loads((demo / "config.json").read_text())
    assert found.values["general.architecture"] == "llama"
    assert found.values["llama.block_count"] == config["num_hidden_layers"]
    assert found.values["llama.attention.head_count_kv"] == config["num_key_value_heads"]
    assert found.values["llama.rope.freq_base"] == config["rope_parameters"]["rope_theta"]
    words = json.loads((demo / "tokenizer.json").read_text("utf-8"))["model"]
    tokens = found.values["tokenizer.ggml.tokens"]
    assert all(tokens[place] == token for token, place in words["vocab"].items())
    assert found.values["tokenizer.ggml.token_type"][:2] == [3, 1]
    assert found.values["tokenizer.ggml.merges"][0] == " ".join(words["merges"][0])
    assert found.values["tokenizer.ggml.add_bos_token"] is False
    tensors = load_file(demo / "model.safetensors")
    assert len(found.arrays) == len(tensors) - ("lm_head.weight" in tensors)
    for name in ("model.embed_tokens.weight", "model.layers.3.mlp.down_proj.weight"):
        assert np.array_equal(found.arrays[gguf_name(name)], tensors[name].float().numpy())
    queries = tensors["model.layers.0.self_attn.q_proj.weight"].float().numpy()
    assert np.array_equal(
        found.arrays["blk.0.attn_q.weight"], reordered(queries, config["num_attention_heads"])
    )


def test_halves_of_heads_are_interleaved() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert reordered(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_another_tokenizer_is_refused() -> None:
    words = {"model": {"type": "Unigram"}, "pre_tokenizer": {"type": "ByteLevel"}}
    with pytest.raises(DraftlineError, match="byte-level BPE"):
        tokenizer_values(words)
