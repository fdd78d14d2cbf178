"""The page for those who come from other servers names flags, drafters and fields that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import draftline
import typer
import yaml
from draftline import DrafterConfig
from draftline.deploy.cli.main import app
from draftline.deploy.settings.settings import build_serve_args
from typer.main import get_command

PAGE = (Path(draftline.__file__).parent / "docs" / "migration.md").read_text("utf-8")
ROW = re.compile(r"(?m)^\|([^|]*)\|([^|]*)\|")
FLAG = re.compile(r"--[a-z][a-z0-9-]+")
YAML = re.compile(r"(?ms)^```yaml$(.*?)^```$")
DRAFTERS = re.compile(r"`(\[\{\"kind\".*?\}\])`")


def test_flags_of_draftline_are_there() -> None:
    command = get_command(app).commands["serve"]
    parameters = command.get_params(typer.Context(command))
    known = {name for one in parameters for name in (*one.opts, *one.secondary_opts)}
    # Those of vLLM are ours where the page says that they are the same.
    cells = [
        f"{theirs} {ours}" if "the same" in ours else ours for theirs, ours in ROW.findall(PAGE)
    ]
    named = {flag for cell in cells for flag in FLAG.findall(cell)}
    assert len(named) > 12
    assert not named - known


def test_drafters_are_there() -> None:
    lists = [json.loads(text) for text in DRAFTERS.findall(PAGE)]
    assert len(lists) >= 4
    for drafters in lists:
        assert [DrafterConfig(**drafter).kind for drafter in drafters]


def test_the_application_is_one() -> None:
    _, after = (yaml.safe_load(text) for text in YAML.findall(PAGE))
    [application] = after["applications"]
    args = build_serve_args(application["args"])
    assert args.engine.pipeline_parallel_size == 2
    assert application["import_path"] == "draftline.deploy.ray_serve.serve_app:build_app"
