"""Nothing that is measured on was trained on, under whatever name."""

from __future__ import annotations

from draftline.training.corpus import (
    COPIED_ELSEWHERE,
    held_out_files,
    held_out_names,
    training_files,
)

# Lines so long are seldom equal by chance.
MIN_LINE_CHARS = 20


def long_lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= MIN_LINE_CHARS}


def test_no_training_file_holds_half_of_a_held_out_file() -> None:
    held_out = {file.name: long_lines(file.text) for file in held_out_files()}
    trained_on = training_files(more=True)
    assert held_out
    assert trained_on
    for file in trained_on:
        lines = long_lines(file.text)
        for name, wanted in held_out.items():
            assert len(lines & wanted) < len(wanted) / 2, f"{file.name} is a copy of {name}"


def test_files_that_are_left_out_are_not_trained_on() -> None:
    names = {file.name for file in training_files(more=True)}
    assert names
    assert names.isdisjoint(held_out_names())
    assert names.isdisjoint(COPIED_ELSEWHERE)
    assert held_out_names().isdisjoint(COPIED_ELSEWHERE)
