"""`draftline dashboard`: the Grafana dashboard, alone or as further rows of Ray's own for LLMs.

Ray makes its dashboards by the version that is installed, so they are not copied here: the patch is
made of what this Ray makes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...core.errors import DraftlineError

FILE = Path(__file__).parents[1] / "assets" / "observability" / "grafana-dashboard.json"
# What Ray's dashboards call their Prometheus, as ours does.
DATASOURCE = "datasource"

Json = dict[str, Any]


def own_dashboard() -> Json:
    """draftline's dashboard."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def ray_llm_dashboard() -> Json:
    """The dashboard for LLMs of the Ray that is installed. Raises `DraftlineError` without one."""
    try:
        # Seconds, which other commands need not wait for; and no interface that Ray promises.
        from ray.dashboard.modules.metrics.grafana_dashboard_factory import (  # noqa: PLC0415
            generate_serve_llm_grafana_dashboard,
        )
    except ImportError as error:
        raise DraftlineError(f"this Ray makes no dashboard for LLMs: {error}") from error
    content, _ = generate_serve_llm_grafana_dashboard()
    return json.loads(content)


def merged(base: Mapping[str, Any], added: Mapping[str, Any]) -> Json:
    """A dashboard with the panels of another below its own, and what they need.

    Raises `DraftlineError` where both have a variable of one name that is not the data source's.
    """
    whole: Json = copy.deepcopy(dict(base))
    panels: list[Json] = whole["panels"]
    first_id = 1 + max((panel["id"] for panel in _all_panels(panels)), default=0)
    top = max((_bottom(panel) for panel in panels), default=0)
    for panel in copy.deepcopy(added["panels"]):
        for one in _all_panels([panel]):
            one["id"] = first_id + one["id"]
            one["gridPos"]["y"] += top
        if panel["type"] == "row":
            panel["title"] = f"draftline: {panel['title']}"
        panels.append(panel)
    variables: list[Json] = whole["templating"]["list"]
    names = {variable["name"] for variable in variables}
    for variable in added["templating"]["list"]:
        if variable["name"] not in names:
            variables.append(copy.deepcopy(variable))
        elif variable["name"] != DATASOURCE:
            raise DraftlineError(f"both dashboards have a variable {variable['name']!r}")
    return whole


def _all_panels(panels: list[Json]) -> Iterator[Json]:
    """Panels, and those within rows that are closed."""
    for panel in panels:
        yield panel
        yield from _all_panels(panel.get("panels", []))


def _bottom(panel: Json) -> int:
    place = panel["gridPos"]
    return place["y"] + place["h"]


def dashboard_text(*, ray_llm: bool) -> str:
    """The JSON of a dashboard. Raises `DraftlineError`."""
    own = own_dashboard()
    whole = merged(ray_llm_dashboard(), own) if ray_llm else own
    return json.dumps(whole, indent=2) + "\n"
