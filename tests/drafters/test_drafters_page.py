"""Sections that the code names exist; docs/drafters.md has every option."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import draftline
import pytest
from draftline.cluster.config import DrafterConfig
from draftline.drafters.heads.options import HeadOptions
from draftline.drafters.model.options import ModelOptions
from draftline.drafters.ngram.anpd import AnpdOptions
from draftline.drafters.ngram.lookahead import LookaheadOptions
from draftline.drafters.ngram.prompt_lookup import PromptLookupOptions
from draftline.drafters.ngram.token_recycling import TokenRecyclingOptions
from draftline.drafters.retrieval import RetrievalOptions
from draftline.drafters.spectra.drafter import SpectraOptions
from draftline.drafters.suffix.drafter import SuffixOptions
from support.tools.pages import DOCS, headings, sections

ROOT = Path(draftline.__file__).parent
SOURCES = ("cluster", "core", "deploy", "drafters", "kernels", "models", "retrieval_store", "tests")
SECTION = re.compile(r'(docs/[\w-]+\.md),\s+"([^"]+)"')

OPTIONS = {
    "Prompt lookup": PromptLookupOptions,
    "ANPD": AnpdOptions,
    "Lookahead": LookaheadOptions,
    "SPECTRA": SpectraOptions,
    "Suffix decoding": SuffixOptions,
    "Token Recycling": TokenRecyclingOptions,
    "Retrieval": RetrievalOptions,
    "Model drafter": ModelOptions,
    "Head drafter": HeadOptions,
}
WORDS = {"True": "on", "False": "off", "()": "none"}


def test_sections_that_the_code_names_are_there() -> None:
    named = {
        found
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for found in SECTION.findall(path.read_text(encoding="utf-8"))
    }
    assert named
    assert not [one for one in named if one[1] not in headings(ROOT / one[0])]


@pytest.mark.parametrize("heading", OPTIONS)
def test_options_are_on_the_page_with_their_defaults(heading: str) -> None:
    told: dict[str, str] = {}
    for row in sections(DOCS / "drafters.md")[heading].partition("\n### ")[0].splitlines():
        if row.startswith("| `"):
            _, names, defaults, *_ = (cell.strip() for cell in row.split("|"))
            own = re.findall(r"`(\w+)`", names)
            values = [value.strip("` ") for value in re.split(r", | \(", defaults)]
            told |= dict(zip(own, values * len(own) if len(values) == 1 else values, strict=False))
    options = OPTIONS[heading]
    fixed = options.FIXED
    own = {one.name: one.default for one in fields(options) if one.name not in fixed}
    assert not told.keys() & set(fixed)
    if heading == "Retrieval":
        # The settings of every drafter give it.
        own["max_nodes"] = DrafterConfig.model_fields["max_nodes"].default
    wanted = {name: WORDS.get(str(value), str(value)) for name, value in own.items()}
    assert {name: told.get(name) for name in wanted} == wanted
