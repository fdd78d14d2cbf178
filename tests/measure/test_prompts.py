"""Prompt files in every form, and what is wrong with one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.cli.bench.job import Dataset
from draftline.measure.prompts import FORMS, BenchPrompt, read_prompts, spread

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
        BenchPrompt("81", "Write.", "writing", ("Rewrite.",)),
        BenchPrompt("HumanEval/0", "def f():\n", reference="    pass\n"),
        BenchPrompt("stdlib/a.py:1", "import a"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{', "line 2 is not JSON"),
        ("1", "line 1 is not a JSON object"),
        ("[1]", "entry 0 is not a JSON object"),
        ('{"question": "a"}', "line 1 has no text: expected `turns`"),
        ('{"turns": []}', "line 1: turns: expected a list of texts"),
        ('{"prompt": ""}', "line 1: prompt: expected a text"),
        ('{"test_list": [], "code": "x"}', "line 1: prompt: expected a text"),
        ('{"text": "a", "test_list": 3, "code": "x"}', "line 1: test_list: expected a list"),
        ('{"conversations": 3}', "line 1: conversations: expected a list of objects"),
        ("\n", "holds no prompt"),
        ("[]", "holds no prompt"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value)


SAID = [
    {"from": "human", "value": "Hi."},
    {"from": "gpt", "value": "Hello."},
    {"from": "human", "value": "Bye."},
]
ROWS = {
    "mt-bench": (SPEC_BENCH, BenchPrompt("81", "Write.", "writing", ("Rewrite.",))),
    "gsm8k": (
        {"question": "1 + 1?", "answer": "#### 2"},
        BenchPrompt("?", "Question: 1 + 1?\nAnswer:", reference="#### 2"),
    ),
    "mbpp": (
        {"task_id": 2, "text": "Add.", "code": "def add()", "test_list": ["assert 1", "assert 2"]},
        BenchPrompt(
            "2",
            "You are an expert Python programmer, and here is your task: Add. Your code should "
            "pass these tests:\n\nassert 1\nassert 2\n",
            reference="def add()",
        ),
    ),
    "cnn-dm": (
        {"id": "f0", "article": "Long.", "highlights": "Short."},
        BenchPrompt("f0", "Summarize: Long.", reference="Short."),
    ),
    "sharegpt": (
        {"id": "s", "conversations": SAID, "timestamp": 7},
        BenchPrompt("s", "Hi.", "", ("Bye.",), "Hello.", arrives_s=0.0),
    ),
    "messages": (
        {
            "id": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi."},
                {"role": "assistant", "content": "Hello."},
                {"role": "user", "content": "Bye."},
            ],
        },
        BenchPrompt("m", "Hi.", "", ("Bye.",), "Hello.", system="Be brief."),
    ),
}


@pytest.mark.parametrize("dataset", ROWS)
def test_published_forms_are_told_by_their_keys(tmp_path: Path, dataset: str) -> None:
    row, expected = ROWS[dataset]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(row))
    expected = replace(expected, name=expected.name.replace("?", f"{path} line 1"))
    assert read_prompts(path) == [expected]
    assert read_prompts(path, dataset) == [expected]


def test_the_form_that_is_asked_for_is_required(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(HUMAN_EVAL))
    with pytest.raises(ConfigError, match="line 1 is no row of gsm8k: it has no answer"):
        read_prompts(path, "gsm8k")


def test_lists_and_csv_are_read(tmp_path: Path) -> None:
    """ShareGPT is published as one list; parts of it have no answer. CNN/DM comes as CSV, too."""
    listed, table = tmp_path / "s.json", tmp_path / "c.csv"
    silent = {"id": "t", "conversations": SAID[:1]}
    listed.write_text(json.dumps([ROWS["sharegpt"][0], silent], indent=1))
    assert [one.name for one in read_prompts(listed)] == ["s"]
    table.write_text('id,article,highlights\n1,"two\nlines",Short.\n')
    assert read_prompts(table) == [BenchPrompt("1", "Summarize: two\nlines", reference="Short.")]


def test_times_count_from_the_first_request(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    rows = [{"conversations": SAID, "timestamp": at} for at in (12.5, 10, 11)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [one.arrives_s for one in read_prompts(path)] == [2.5, 0.0, 1.0]


def test_every_form_can_be_asked_for() -> None:
    assert set(get_args(Dataset)) == set(FORMS)


def test_spread_covers_the_file_and_repeats_when_it_must() -> None:
    prompts = [BenchPrompt(str(n), "x") for n in range(6)]
    assert [one.name for one in spread(prompts, 3)] == ["0", "2", "4"]
    assert [one.name for one in spread(prompts, 8)] == [*"01234501"]
    assert spread(prompts, None) == prompts
