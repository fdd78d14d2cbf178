"""`draftline dashboard` prints or writes the dashboard."""

from __future__ import annotations

import json
from pathlib import Path

from draftline.deploy.cli.main import DASHBOARD, app
from typer.testing import CliRunner


def test_the_command_prints_or_writes_the_dashboard(tmp_path: Path) -> None:
    file = tmp_path / "dashboard.json"
    printed = CliRunner().invoke(app, ["dashboard"])
    assert printed.exit_code == 0, printed.output
    assert CliRunner().invoke(app, ["dashboard", "-o", str(file)]).exit_code == 0
    assert file.read_text("utf-8") == printed.stdout
    assert json.loads(printed.stdout) == json.loads(DASHBOARD.read_text("utf-8"))
