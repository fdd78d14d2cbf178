"""What is said at start: each line where it is true, and nowhere else."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from draftline.deploy.api.start_notes import engine_notes, log_notes, server_notes
from draftline.deploy.settings.settings import build_serve_args

LEARNER = {"kind": "retrieval", "store": "demo-store", "learn": True}
TENANT = {"name": "acme", "key_sha256": "0" * 64}


def said(**settings: Any) -> list[str]:
    args = build_serve_args({"model": "demo", "pipeline_parallel_size": 2, **settings})
    return [*engine_notes(args.engine), *server_notes(args)]


def about(text: str, **settings: Any) -> list[str]:
    return [note for note in said(**settings) if text in note]


def test_the_bundled_model_is_a_toy(checkpoint: Path) -> None:
    [note] = about("toy")
    assert note.startswith("demo is a toy")
    assert not about("toy", model=str(checkpoint))


def test_stages_that_nobody_asked_for() -> None:
    assert not about("stage")
    args = build_serve_args({"model": "demo"})
    [note] = [note for note in engine_notes(args.engine) if "stage" in note]
    assert note.startswith("1 stage, the default; pipeline_parallel_size ")


@pytest.mark.parametrize(
    ("server", "learns"),
    [
        ({}, False),
        ({"api_key_sha256": "0" * 64}, False),
        ({"tenants": [{**TENANT, "learn": False}]}, False),
        ({"tenants": [TENANT]}, True),
        ({"tenants": [{**TENANT, "learn": False}, {"name": "b", "key_sha256": "1" * 64}]}, True),
        # Whose tenants come and go.
        ({"tenant_store": "tenants.yaml"}, True),
    ],
)
def test_learning_without_a_tenant(server: dict[str, Any], learns: bool) -> None:
    notes = about("learns nothing", drafters=[LEARNER], server=server)
    assert len(notes) == (not learns)
    assert all(note.startswith("drafter retrieval learns nothing: learn: true") for note in notes)
    # Where nothing is to be learned, nothing is missed.
    assert not about("learns nothing", drafters=[{**LEARNER, "learn": False}], server=server)


def with_template(checkpoint: Path, folder: Path, template: str | None) -> str:
    shutil.copytree(checkpoint, folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings.pop("chat_template", None)
    file.write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)


@pytest.mark.parametrize(
    ("template", "parser", "is_known"),
    [
        ("{{ messages }}", "auto", False),
        ("{{ messages }}", "none", False),
        ("{{ messages }}", "hermes", True),
        ("{{ messages }}<tool_call>", "auto", True),
        # Without a template there are no chats, and so no tools.
        (None, "auto", True),
    ],
)
def test_how_the_model_calls_tools(
    checkpoint: Path, tmp_path: Path, template: str | None, parser: str, is_known: bool
) -> None:
    model = with_template(checkpoint, tmp_path / "model", template)
    notes = about("tool_choice: auto get 400", model=model, server={"tool_call_parser": parser})
    assert len(notes) == (not is_known)
    assert all("tool_call_parser (mistral, hermes, llama3_json)" in note for note in notes)


def test_drafters_of_another_tokenizer() -> None:
    other = {"kind": "model", "model": "demo-drafter-other-vocab"}
    [note] = about("tokenizer", drafters=[other])
    # 1239 / 4096 and 1239 / 2048; slem, since texts of shared tokens alone would be short.
    assert note == (
        "drafter model has another tokenizer than the model: vocabulary slem, as auto chose; "
        "1239 tokens are in both: 30% of the target's 4096, 60% of the drafter's 2048"
    )
    [note] = about("tokenizer", drafters=[{**other, "vocabulary": "tli", "name": "small"}])
    assert note.startswith("drafter small has another tokenizer than the model: vocabulary tli; ")


@pytest.mark.parametrize("model", ["demo-drafter", "no/such/model"])
def test_nothing_is_said_of_a_drafter_of_the_same_tokenizer_or_of_none(model: str) -> None:
    assert not about("tokenizer", drafters=[{"kind": "model", "model": model}])


def test_a_log_has_them_whatever_its_level(caplog: pytest.LogCaptureFixture) -> None:
    assert logging.getLogger().getEffectiveLevel() >= logging.WARNING
    log_notes("small", ["a thing", "another"])
    assert caplog.messages == [
        "event=start_note model=small a thing", "event=start_note model=small another",
    ]  # fmt: skip
    assert {record.levelname for record in caplog.records} == {"INFO"}
