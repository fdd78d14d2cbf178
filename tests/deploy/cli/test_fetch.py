"""`draftline fetch`, and the question of commands that name a model that is not here."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from draftline.core.errors import CheckpointError
from draftline.deploy.cli import fetch as cli
from draftline.deploy.cli import main
from rich.console import Console


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was fetched: from nowhere, into this list."""
    names: list[str] = []

    def fetch(name: str, on_step: Callable[[str], object]) -> Path:
        on_step("downloading")
        names.append(name)
        return Path(name)

    monkeypatch.setattr(cli, "fetch", fetch)
    monkeypatch.setattr(cli, "is_fetched", names.__contains__)
    return names


def screen() -> Console:
    return Console(file=io.StringIO())


def test_a_model_is_fetched_by_name_and_only_once(
    fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["draftline", "fetch", "smollm2"])
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == 0
    assert fetched == ["smollm2"]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no public model 'smollm3'; there are smollm2"):
        cli.run_fetch("smollm3", screen())


@pytest.mark.parametrize(("answer", "names"), [(True, ["smollm2"]), (False, [])])
def test_a_terminal_is_asked(
    answer: bool, names: list[str], fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(cli.typer, "confirm", lambda text, default: asked.append(text) or answer)
    cli.make_ready("smollm2", screen())
    assert asked == ["smollm2 is not on this machine. Fetch it (93 MB, Apache-2.0)?"]
    assert fetched == names


@pytest.mark.parametrize("name", ["smollm2", "demo", None, "/models/own"])
def test_without_a_terminal_nothing_is_asked(name: str | None, fetched: list[str]) -> None:
    cli.make_ready(name, screen())
    assert not fetched


def test_a_file_is_unpacked_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Path] = []
    monkeypatch.setattr("draftline.models.load.gguf_file.unpacked", done.append)
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    cli.make_ready(str(tmp_path / "small.gguf"), screen())
    cli.make_ready(str(tmp_path / "none.gguf"), screen())
    assert done == [tmp_path / "small.gguf"]
