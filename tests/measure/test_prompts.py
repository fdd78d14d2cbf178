"""Prompt files in every form, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draftline.core.errors import ConfigError
from draftline.measure.clients.prompts import BenchPrompt, read_prompts, spread

SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def f():\n",
    "entry_point": "f",
    "canonical_solution": "    pass\n",
}
OURS = {"name": "stdlib/a.py:1", "prompt": "import a"}


def test_forms_are_told_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n".join(map(json.dumps, (SPEC_BENCH, HUMAN_EVAL, OURS))) + "\n")
    assert read_prompts(path) == [
        BenchPrompt("81", "Write.", "writing"),
        BenchPrompt("HumanEval/0", "def f():\n"),
        BenchPrompt("stdlib/a.py:1", "import a"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{', "line 2 is not JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ('{"question": "a"}', "line 1 has no text: expected `turns`"),
        ('{"turns": []}', "line 1 has no text"),
        ("\n", "holds no prompt"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value)


def test_spread_covers_the_file_and_repeats_when_it_must() -> None:
    prompts = [BenchPrompt(str(n), "x") for n in range(6)]
    assert [one.name for one in spread(prompts, 3)] == ["0", "2", "4"]
    assert [one.name for one in spread(prompts, 8)] == [*"01234501"]
    assert spread(prompts, None) == prompts
