"""Reads the file of a dataset: JSON lines, a JSON list, or CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from .bench_prompt import BenchPrompt
from .forms import FORMS, KNOWN, form_of, name_of

FIELD = "prompts"


def read_prompts(path: Path, dataset: str | None = None) -> list[BenchPrompt]:
    """The prompts of a file, in its order.

    dataset  the format of its rows, one of `FORMS`; None: found by each row's keys

    Arrival times start at the first one. Conversations without an answer (such as some of
    ShareGPT's) are skipped. Raises `ConfigError` naming the line or the row.
    """
    rows = list(_rows(path))
    prompts = [prompt for where, row in rows if (prompt := _parse(where, row, dataset)) is not None]
    if not prompts:
        raise ConfigError(FIELD, f"{path} holds no prompt")
    times = [prompt.arrives_s for prompt in prompts]
    if None in times:
        return prompts
    first = min(time for time in times if time is not None)
    return [replace(one, arrives_s=(one.arrives_s or 0.0) - first) for one in prompts]


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Every row with its location."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(FIELD, f"cannot read {path}: {error}") from error
    if path.suffix == ".csv":
        csv.field_size_limit(2**31 - 1)
        for number, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
            yield f"{path} row {number}", row
    elif text.lstrip().startswith("["):
        for number, row in enumerate(_json(str(path), text)):
            yield f"{path} entry {number}", row
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                where = f"{path} line {number}"
                yield where, _json(where, line)


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(FIELD, f"{where} is not JSON: {error.msg}") from error


def _parse(where: str, row: Any, dataset: str | None) -> BenchPrompt | None:
    if not isinstance(row, dict):
        raise ConfigError(FIELD, f"{where} is not a JSON object")
    form = form_of(row) if dataset is None else FORMS[dataset]
    if form is None:
        raise ConfigError(FIELD, f"{where} has no text: expected {KNOWN}")
    missing = set(form.keys) - row.keys()
    if missing:
        raise ConfigError(FIELD, f"{where} is no row of {dataset}: it has no {sorted(missing)[0]}")
    try:
        return form.read(name_of(row, where), row)
    except ValueError as error:
        raise ConfigError(FIELD, f"{where}: {error}") from error
