"""Cuts the bundled prompts from the held-out files: `python -m draftline.training.prompts`.

A prompt is some whole lines of a file that end where a programmer would go on typing: after a
function's docstring, after its header, or after a statement in the middle of its body.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from .corpus import SourceFile, held_out_files

OUTPUT = Path(__file__).parent.parent / "deploy" / "assets" / "prompts" / "held_out.jsonl"
MIN_CHARS, MAX_CHARS = 300, 450
# Least number of characters after the cut, for a continuation.
MIN_CHARS_AFTER = 400
PROMPTS_PER_FILE = 2


@dataclass(frozen=True, slots=True)
class Prompt:
    """`name` is the file and the 1-based number of the prompt's last line: `stdlib/csv.py:42`."""

    name: str
    prompt: str


def cut_prompts(file: SourceFile, count: int) -> list[Prompt]:
    """At most `count` prompts, spread evenly over the file; the same for the same text.

    Each has `MIN_CHARS` to `MAX_CHARS` characters and ends without a newline. Raises `SyntaxError`
    if the file is not Python.
    """
    lines = file.text.splitlines()
    found = []
    for end in sorted(set(_cuts(ast.parse(file.text)))):
        prompt = _lines_before(lines, end)
        after = sum(len(line) for line in lines[end:])
        if len(prompt) >= MIN_CHARS and after >= MIN_CHARS_AFTER:
            found.append(Prompt(f"{file.name}:{end}", prompt))
    count = min(count, len(found))
    return [found[(2 * index + 1) * len(found) // (2 * count)] for index in range(count)]


def _cuts(tree: ast.Module) -> Iterator[int]:
    """Numbers of the lines after which a prompt may end."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0]
        if ast.get_docstring(node, clean=False) is not None:
            yield first.end_lineno or first.lineno
        elif first.lineno > node.lineno:
            yield first.lineno - 1
        if len(node.body) >= 4:
            middle = node.body[len(node.body) // 2]
            yield middle.end_lineno or middle.lineno


def _lines_before(lines: Sequence[str], end: int) -> str:
    """As many whole lines up to number `end` as `MAX_CHARS` holds; empty if that line is blank."""
    if not lines[end - 1].strip():
        return ""
    start, size = end, -1
    while start > 0 and size + 1 + len(lines[start - 1]) <= MAX_CHARS:
        start -= 1
        size += 1 + len(lines[start])
    return "\n".join(lines[start:end]).lstrip("\n").rstrip()


def main(
    output: Annotated[Path, typer.Option(help="JSON lines, one prompt each")] = OUTPUT,
    per_file: Annotated[int, typer.Option(min=1)] = PROMPTS_PER_FILE,
) -> None:
    """Cut prompts from every held-out file of this interpreter and write them as JSON lines."""
    prompts = [prompt for file in held_out_files() for prompt in cut_prompts(file, per_file)]
    rows = (json.dumps(asdict(prompt), ensure_ascii=False) for prompt in prompts)
    output.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    typer.echo(f"{len(prompts)} prompts in {output}")


if __name__ == "__main__":
    typer.run(main)
