"""draftline's panels within the dashboard that this Ray makes for LLMs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draftline.core.errors import DraftlineError
from draftline.deploy.cli.dashboard import merged, own_dashboard, ray_llm_dashboard
from draftline.deploy.cli.main import app
from typer.testing import CliRunner

# Ray's modules warn when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore")


def every(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from every(panel.get("panels", []))


def test_ray_s_dashboard_keeps_its_panels_and_gets_all_of_ours() -> None:
    ray, own = ray_llm_dashboard(), own_dashboard()
    whole = merged(ray, own)
    assert whole["panels"][: len(ray["panels"])] == ray["panels"]
    added = whole["panels"][len(ray["panels"]) :]
    assert [panel.get("targets") for panel in added] == [
        panel.get("targets") for panel in own["panels"]
    ]
    ids = [panel["id"] for panel in every(whole["panels"])]
    assert len(set(ids)) == len(ids)
    # Below everything of Ray's, in our own order.
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in ray["panels"])
    assert min(panel["gridPos"]["y"] for panel in added) == bottom
    rows = [panel["title"] for panel in added if panel["type"] == "row"]
    assert rows
    assert all(title.startswith("draftline: ") for title in rows)
    # It is still Ray's, by the name under which Ray's own pages link to it.
    assert whole["uid"] == ray["uid"]


def test_every_variable_is_there_once() -> None:
    ray, own = ray_llm_dashboard(), own_dashboard()
    names = [variable["name"] for variable in merged(ray, own)["templating"]["list"]]
    assert len(set(names)) == len(names)
    assert {"datasource", "model", "engine", "deployment"} <= set(names)
    assert {variable["type"] for variable in ray["templating"]["list"]
            if variable["name"] == "datasource"} == {"datasource"}  # fmt: skip


def test_a_variable_of_the_same_name_is_no_patch() -> None:
    own = own_dashboard()
    with pytest.raises(DraftlineError, match="'model'"):
        merged(own, own)


def test_a_dashboard_without_panels_takes_ours() -> None:
    own = own_dashboard()
    empty: dict[str, Any] = {"panels": [], "templating": {"list": []}}
    whole = merged(empty, own)
    assert [panel["gridPos"] for panel in whole["panels"]] == [
        panel["gridPos"] for panel in own["panels"]
    ]


@pytest.mark.parametrize("flags", [[], ["--ray-llm"]])
def test_the_command_writes_either(tmp_path: Path, flags: list[str]) -> None:
    file = tmp_path / "dashboard.json"
    printed = CliRunner().invoke(app, ["dashboard", *flags])
    assert printed.exit_code == 0, printed.output
    assert CliRunner().invoke(app, ["dashboard", *flags, "-o", str(file)]).exit_code == 0
    written = json.loads(file.read_text("utf-8"))
    assert json.loads(printed.stdout) == written
    assert ("rayVersion" in str(written["tags"])) == bool(flags)
