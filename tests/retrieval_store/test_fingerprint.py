from __future__ import annotations

from pathlib import Path

import pytest
from draftline.core.errors import CheckpointError
from draftline.retrieval_store.fingerprint import model_hash, tokenizer_hash


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(5 * 2**20))
    return tmp_path


def test_what_ties_a_segment_to_a_model(folder: Path) -> None:
    tokenizer, model = tokenizer_hash(folder), model_hash(folder)
    assert (tokenizer_hash(folder), model_hash(folder)) == (tokenizer, model)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    assert tokenizer_hash(folder) != tokenizer
    assert model_hash(folder) == model


@pytest.mark.parametrize("at", [0, 5 * 2**19, 5 * 2**20 - 1])
def test_other_weights_have_another_hash(folder: Path, at: int) -> None:
    before = model_hash(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(at)
        file.write(b"\1")
    assert model_hash(folder) != before


def test_the_length_and_the_configuration_count(folder: Path) -> None:
    hashes = {model_hash(folder)}
    (folder / "model.safetensors").write_bytes(bytes(5 * 2**20 + 1))
    hashes.add(model_hash(folder))
    (folder / "config.json").write_text('{"layers": 1}')
    hashes.add(model_hash(folder))
    assert len(hashes) == 3


def test_folders_without_a_model_are_refused(tmp_path: Path) -> None:
    for fingerprint in (tokenizer_hash, model_hash):
        with pytest.raises(CheckpointError, match="is it a model folder"):
            fingerprint(tmp_path)
