"""Heads that were trained alike, each beside the one that it should be better or worse than.

    python -m draftline.benchmarks.heads.equal_training FOLDER

Keeps what the training records in FOLDER say, one folder a head, as
`benchmarks/results/heads-equal-training.json`; all must be of as many steps and texts. Their rows
are those of `heads-equal-griffin-PROMPTS-TEMPERATURE.json` and of `heads-equal-specformer-...`, of
`draftline bench --suite heads --suite-rows`. HASS and GRIFFIN are trained with `--best-weight 0`
there, and in `heads-published-...` with the published weights; `heads-longer-...` are of heads that
were trained for 1,600 steps, with the published weights, too, and `heads-alignment-...` of the
bundled GRIFFIN and one that was trained as long, and so, without alignment. `tables.py` writes all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...core.errors import ConfigError
from ...deploy.cli.bench.head_rows import CHAIN, TREE
from ...measure.report.intervals import tau_difference
from ...measure.report.marked_part import markdown_table
from ...training.heads.export import RECORD

RESULTS = Path(__file__).parents[1] / "results"
TRAINING = "heads-equal-training.json"
EQUAL, PUBLISHED = "equal training", "equal training, published weights"
LONGER = "longer training, published weights"
ALIGNMENT = "longer training, alignment"
# The beginnings of their files' names: a family's rows come from one run.
SUITES = {
    EQUAL: ("heads-equal-griffin", "heads-equal-specformer"),
    PUBLISHED: ("heads-published",),
    LONGER: ("heads-longer",),
    ALIGNMENT: ("heads-alignment",),
}
# A head, and the one that is compared with it: what papers say to be less comes first.
PAIRS = (
    ("eagle2", "hass"),
    ("hass", "griffin"),
    ("griffin-no-alignment", "griffin"),
    ("griffin-no-fusion", "griffin"),
    ("griffin-no-enhanced", "griffin"),
    ("specformer-no-distillation", "specformer"),
    ("specformer-causal", "specformer"),
)
KEPT = ("kind", "steps", "texts", "self_distillation", "loss", "acceptance_by_depth", "parameters")


def collected(folder: Path) -> dict[str, dict[str, Any]]:
    """What training records say, by folder. Raises `ConfigError` if they are not alike."""
    found = {}
    for path in sorted(folder.glob(f"*/{RECORD}")):
        record = json.loads(path.read_text("utf-8"))
        found[path.parent.name] = {key: record[key] for key in KEPT}
    lengths = {(record["steps"], record["texts"]) for record in found.values()}
    if len(lengths) != 1:
        raise ConfigError(
            "folder", f"{folder} has no heads of as many steps and texts, but {sorted(lengths)}"
        )
    return found


def together(
    families: Iterable[Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Rows of tau of all families, by column."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for columns in families:
        for column, content in columns.items():
            found.setdefault(column, {"taus": []})["taus"] += content["taus"]
    return found


def depth_table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Share of drafts behind accepted ones that are accepted, of held-out texts."""
    shares = {name: record["acceptance_by_depth"] for name, record in records.items()}
    depths = range(max(map(len, shares.values())))
    lines = [
        [name, *(f"{own[depth]:.2f}" if depth < len(own) else "-" for depth in depths)]
        for name, own in shares.items()
    ]
    title = "equal training: accepted behind accepted drafts"
    return markdown_table([title, *(str(depth + 1) for depth in depths)], lines)


def pairs() -> Iterator[tuple[str, str]]:
    """Rows that are compared, as chains and then as trees; last a tree with its chain."""
    for form in (CHAIN, TREE):
        for less, more in PAIRS:
            yield f"{less} {form}", f"{more} {form}"
    yield f"specformer {CHAIN}", f"specformer {TREE}"


def difference_table(title: str, columns: Mapping[str, Mapping[str, Any]]) -> str:
    """By how much tau of the second of a pair is above that of the first, on the same prompts."""
    counts = {
        column: {row["name"]: row["by_prompt"] for row in content["taus"]}
        for column, content in columns.items()
    }
    lines = []
    for less, more in pairs():
        cells = [_difference(known, less, more) for known in counts.values()]
        if any(cells):
            lines.append([f"{more} over {less}", *(cell or "-" for cell in cells)])
    return markdown_table([f"{title}: difference of tau", *columns], lines)


def _difference(counts: Mapping[str, Any], less: str, more: str) -> str:
    """Empty where one of them was not measured."""
    if less not in counts or more not in counts:
        return ""
    found = tau_difference(counts[more], counts[less])
    return f"{found.value:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


def main(folder: Annotated[Path, typer.Argument(help="Folder of heads' folders.")]) -> None:
    """Keep the records."""
    content = json.dumps(collected(folder), indent=1)
    (RESULTS / TRAINING).write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
