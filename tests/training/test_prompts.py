"""Prompts are cut where a programmer would go on typing, from held-out files only."""

from __future__ import annotations

import json

import pytest
from draftline.training.corpus import SourceFile, held_out_files, held_out_names
from draftline.training.prompts import MAX_CHARS, MIN_CHARS, OUTPUT, cut_prompts

FILLER = "".join(f"VALUE_{number} = {number}\n" for number in range(40))
FUNCTION = 'def area(width, height):\n    """Area of a rectangle, square metres."""\n'


def shipped() -> list[dict[str, str]]:
    return [json.loads(line) for line in OUTPUT.read_text(encoding="utf-8").splitlines()]


def test_a_prompt_ends_after_a_docstring() -> None:
    text = FILLER + FUNCTION + "    return width * height\n" + FILLER
    [prompt] = cut_prompts(SourceFile("stdlib/area.py", text), 3)
    assert prompt.name == "stdlib/area.py:42"
    assert (FILLER + FUNCTION).endswith(prompt.prompt + "\n")
    assert prompt.prompt.endswith('"""Area of a rectangle, square metres."""')


@pytest.mark.parametrize(("before", "after"), [("", FILLER), (FILLER, "")])
def test_nothing_is_cut_without_enough_text_on_both_sides(before: str, after: str) -> None:
    text = before + FUNCTION + "    return width * height\n" + after
    assert cut_prompts(SourceFile("stdlib/area.py", text), 3) == []


def test_prompts_of_real_files_are_spread_and_repeatable() -> None:
    files = held_out_files()
    assert files
    for file in files:
        prompts = cut_prompts(file, 2)
        assert prompts == cut_prompts(file, 2)
        assert len({prompt.name for prompt in prompts}) == 2
        for prompt in prompts:
            assert MIN_CHARS <= len(prompt.prompt) <= MAX_CHARS
            assert prompt.prompt in file.text


def test_the_shipped_prompts_cover_all_held_out_files_and_no_other() -> None:
    names = [row["name"].rpartition(":")[0] for row in shipped()]
    assert len(names) >= 32
    assert set(names) == held_out_names()


def test_the_shipped_prompts_have_the_promised_form() -> None:
    for row in shipped():
        assert set(row) == {"name", "prompt"}
        assert MIN_CHARS <= len(row["prompt"]) <= MAX_CHARS
        assert row["prompt"] == row["prompt"].rstrip()
