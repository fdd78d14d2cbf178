"""Without self-distillation texts go on as their files do, behind the same prompts."""

from __future__ import annotations

import pytest
from draftline.core.errors import ConfigError
from draftline.training.corpus import SourceFile
from draftline.training.heads.distilled_texts import DistilledText, corpus_texts
from draftline.training.prompts import cut_prompts

FILLER = "".join(f"VALUE_{number} = {number}\n" for number in range(40))
FUNCTION = 'def area(width, height):\n    """Area of a rectangle, square metres."""\n'
FILE = SourceFile("stdlib/area.py", FILLER + FUNCTION + "    return width * height\n" + FILLER)


def encode(text: str) -> list[int]:
    """A token for each byte."""
    return list(text.encode())


def test_a_prompt_is_followed_by_its_file() -> None:
    [prompt] = cut_prompts(FILE, 1)
    given = encode(prompt.prompt)
    distilled = [
        DistilledText((*given, *[7] * count), ((len(given), len(given) + count),))
        for count in (30, 5)
    ]
    first, second = corpus_texts(distilled, [FILE], 1, encode)
    assert first.num_prompt == second.num_prompt == len(given)
    # As many tokens as the target said.
    assert [len(one.tokens) for one in (first, second)] == [len(given) + 30, len(given) + 5]
    written = bytes(first.tokens).decode()
    assert written.endswith("\n    return width * height\nVAL")
    assert written in FILE.text
    assert second.tokens == first.tokens[: len(second.tokens)]


def test_prompts_of_other_files_are_refused() -> None:
    text = DistilledText((*encode("def other():"), 7, 7), ((12, 14),))
    with pytest.raises(ConfigError, match="self_distillation"):
        corpus_texts([text], [FILE], 1, encode)
