"""Findings in a file, so that a process of its own adds a part's, figure by figure."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from .findings import Figure, Findings
from .floors import Rates, Work


def save_findings(path: Path, findings: Findings) -> None:
    """Write all of it; whoever reads meanwhile reads the file of before."""
    content = {
        "rates": None if findings.rates is None else asdict(findings.rates),
        "figures": [asdict(figure) for figure in findings.figures],
        "facts": findings.facts,
        "skipped": findings.skipped,
        "failed": findings.failed,
    }
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content))
    beside.replace(path)


def load_findings(path: Path, findings: Findings) -> None:
    """Put what the file holds in `findings`."""
    content = json.loads(path.read_text())
    findings.rates = None if content["rates"] is None else Rates(**content["rates"])
    findings.figures = [_figure(fields) for fields in content["figures"]]
    findings.facts, findings.skipped = content["facts"], content["skipped"]
    findings.failed = content["failed"]


def _figure(fields: dict[str, object]) -> Figure:
    work = Work(**fields.pop("work"))  # pyright: ignore[reportCallIssue, reportArgumentType]
    order = tuple(fields.pop("order"))  # pyright: ignore[reportArgumentType]
    return Figure(**fields, work=work, order=order)  # pyright: ignore[reportArgumentType]
