"""The dashboard and the alerts name metrics and labels that a server has."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import draftline
import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.tools.pages import DOCS, sections

FOLDER = Path(draftline.__file__).parent / "deploy" / "assets" / "observability"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text("utf-8"))
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text("utf-8"))["groups"][0]["rules"]
ROW = re.compile(r"^\| `(\S+)` \| \w+ \| (.*?) ?\|", re.MULTILINE)
METRICS = sections(DOCS / "operations.md")["Metrics"]
PAGE = {name: re.findall(r"`(\w+)`", own) for name, own in ROW.findall(METRICS)}
NAME = re.compile(r"\b(?:vllm|draftline):\w+")
# What Prometheus adds to what it scrapes, and how it names a metric.
ADDED = {"job", "instance", "__name__"}
SELECTOR = re.compile(r"([\w:]*)\{([^}]*)\}")
MATCHER = re.compile(r"(\w+)\s*[=!]~?\s*\"([^\"]*)\"")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    yield from (rule["expr"] for rule in RULES)
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


@pytest.fixture
async def labels(client: httpx.AsyncClient) -> dict[str, set[str]]:
    """Labels of each series that a server tells after a request, or will once something happens:
    those of the page, which is complete and true (`tests/deploy/api/http/test_metrics.py`)."""
    await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 6})
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if not family.samples and name in PAGE:
            found[name] = {"model_name", *PAGE[name]}
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_every_metric_exists(labels: dict[str, set[str]]) -> None:
    named = {name for text in expressions() for name in NAME.findall(text)}
    assert len(named) > 40
    assert named - labels.keys() == set()


async def test_every_label_exists(labels: dict[str, set[str]]) -> None:
    for text in expressions():
        every: set[str] = set().union(*(labels.get(name, ()) for name in NAME.findall(text)))
        for name, matchers in SELECTOR.findall(text):
            own = {label for label, _ in MATCHER.findall(matchers)}
            assert own <= labels.get(name, own) | ADDED, text
        for grouping in GROUPING.findall(text):
            own = {label.strip() for label in grouping.split(",")}
            assert own <= every | ADDED, text
        for label in re.findall(r"label_values\(.*, (\w+)\)", text):
            assert label in every


async def test_legends_name_labels_that_are_left(labels: dict[str, set[str]]) -> None:
    for panel in panels():
        for target in panel["targets"]:
            kept = {
                label.strip()
                for grouping in GROUPING.findall(target["expr"])
                for label in grouping.split(",")
            }
            if "(" not in target["expr"]:
                kept = set().union(*(labels[name] for name in NAME.findall(target["expr"])))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


async def test_every_metric_has_a_panel(labels: dict[str, set[str]]) -> None:
    shown = {
        name for panel in panels() for t in panel["targets"] for name in NAME.findall(t["expr"])
    }
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    told = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in labels
        if not name.endswith("_created")
    }
    # What became of them is shown.
    assert told - shown == {"draftline:drafter_messages_total"}


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own
    assert all(panel["title"] and panel["description"] for panel in panels())
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_alerts_say_what_is_wrong_and_how_urgent() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 10
    for rule in RULES:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]


@pytest.mark.prometheus
def test_prometheus_takes_the_rules_and_they_fire(tmp_path: Path) -> None:
    cases = {
        "rule_files": [str(FOLDER / "alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": [
            fires("DraftlineDown", 'up{job="draftline", instance="a"}', "0x5", "3m",
                  {"job": "draftline", "instance": "a"}),
            fires("DraftlineDrafterDown", 'draftline:drafter_up{source="s", model_name="m"}',
                  "1 0x9", "5m", {"source": "s", "model_name": "m"}),
            fires("DraftlineHeadLeftOut", 'draftline:drafter_left_out{source="s", model_name="m"}',
                  "0 1x9", "2m", {"source": "s", "model_name": "m"}),
            fires("DraftlineQueueDoesNotEmpty",
                  'vllm:num_requests_waiting{model_name="m", engine="0"}', "3x20", "15m",
                  {"model_name": "m", "engine": "0"}),
            fires("DraftlineLearningFails",
                  'draftline:learning_requests_total{source="s", model_name="m", outcome="failed"}',
                  "0+60x60", "40m", {"source": "s", "model_name": "m"}),
        ],
    }  # fmt: skip
    file = tmp_path / "cases.yaml"
    file.write_text(yaml.safe_dump(cases))
    for command in (["check", "rules", FOLDER / "alerts.yaml"],
                    ["check", "config", "--syntax-only", FOLDER / "prometheus.yaml"],
                    ["test", "rules", file]):  # fmt: skip
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def fires(alert: str, series: str, values: str, at: str, labels: dict[str, str]) -> dict[str, Any]:
    """A case of promtool's: the alert fires at a time, with these labels, and what it says."""
    rule = next(rule for rule in RULES if rule["alert"] == alert)
    summary = re.sub(
        r"\{\{ \$labels\.(\w+) \}\}",
        lambda found: labels.get(found[1], ""),
        rule["annotations"]["summary"],
    )
    expected = {"exp_labels": labels | rule["labels"], "exp_annotations": {"summary": summary}}
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": values}],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": [expected]}],
    }
