from __future__ import annotations

import random

import pytest
from draftline.core.errors import ConfigError
from draftline.retrieval_store.corpus.documents import (
    DocumentFilter,
    DocumentRules,
    licence_share,
)

APACHE = """\
# Copyright 2024 The Authors. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""
MIT = """\
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction.

The above copyright notice and this permission notice shall be included in all copies or substantial
portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE.
"""
CODE = """\
def licensed_by(copyright_year: int) -> bool:
    # Whether the notice has run out.
    return copyright_year + 95 > current_year()

class Reader:
    def read(self, path):
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if not line.startswith("#")]

def main(arguments):
    for path in arguments.paths:
        print(len(Reader().read(path)), path)
"""


def sentence(seed: int, num_words: int = 400) -> list[str]:
    return [f"w{random.Random(seed * 1000 + n).randrange(5000)}" for n in range(num_words)]


def test_copies_and_degenerate_texts_are_dropped() -> None:
    sieve = DocumentFilter(DocumentRules(min_tokens=3, min_compression_ratio=0.05))
    assert sieve.text_fault("def a():\n    return 1") is None
    assert sieve.text_fault("def a():   return 1\n") == "duplicate"
    assert sieve.text_fault("# licence\n" * 1000) == "repetitive"
    assert sieve.text_fault("") is None
    assert sieve.length_fault(3) is None
    assert sieve.length_fault(2) == "too short"


@pytest.mark.parametrize("notice", [APACHE, MIT, APACHE.replace("#", " *"), f"{MIT}\nx = 1\n"])
def test_licences_are_dropped(notice: str) -> None:
    assert DocumentFilter().text_fault(notice) == "licence"


def test_code_under_a_licence_stays() -> None:
    assert licence_share(CODE) == 0
    assert licence_share("") == 0
    text = APACHE + "\n" + CODE * 3
    assert 0 < licence_share(text) < 0.5
    assert DocumentFilter().text_fault(text) is None


def test_near_copies_are_dropped() -> None:
    sieve = DocumentFilter()
    words = sentence(1)
    assert sieve.text_fault(" ".join(words)) is None
    changed = [*words[:200], "other", *words[200:], "end"]
    assert sieve.text_fault(" ".join(changed)) == "near duplicate"
    assert sieve.text_fault(" ".join([*words[:200], *sentence(2, 200)])) is None
    assert sieve.text_fault(" ".join(sentence(3))) is None


def test_what_was_dropped_takes_no_later_document_along() -> None:
    sieve = DocumentFilter(DocumentRules(max_licence_share=0))
    words = " ".join(sentence(4))
    assert sieve.text_fault(f"{words}\n\n{MIT}") == "licence"
    assert sieve.text_fault(words) is None


@pytest.mark.parametrize(
    "rules",
    [{"min_tokens": 0}, {"min_compression_ratio": 2.0}, {"max_licence_share": -1.0},
     {"max_overlap": 1.5}],
)  # fmt: skip
def test_impossible_rules_are_refused(rules: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(rules))):
        DocumentRules(**rules)
