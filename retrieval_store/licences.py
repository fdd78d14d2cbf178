"""How much of a text is licence and copyright notices."""

from __future__ import annotations

import re

# Words that hardly stand anywhere else: of the notices of the Apache, MIT, BSD, ISC, GNU, Mozilla
# and Python licences.
PHRASES = re.compile(
    r"""
    copyright\ (\(c\)|©|[12][0-9]{3})
    | all\ rights\ reserved
    | spdx-license-identifier
    | licen[sc]ed\ (to|under)
    | under\ the\ (terms|licen[sc]e)
    | licen[sc]e\ agreement
    | (general|lesser|mozilla)\ public\ licen[sc]e
    | permission\ (is\ hereby\ granted|to\ use,\ copy)
    | (this|above)\ (copyright|permission)\ notice
    | copyright\ (notice|holder|owner)
    | redistributions?\ (and\ use|of\ source|in\ binary|must)
    | (with|without)\ warrant(y|ies)
    | "?as[ ]is"?\ (basis|and|,|without)
    | warranties\ of\ merchantability
    | fitness\ for\ a\ particular\ purpose
    | in\ no\ event\ shall
    | (in)?direct,\ indirect|consequential\ damages
    | apache\.org/licenses | gnu\.org/licenses | opensource\.org/licenses
    | compliance\ with\ the\ licen[sc]e
    | required\ by\ applicable\ law
    | free\ software\ foundation
    """,
    re.VERBOSE | re.IGNORECASE,
)
MARKERS = re.compile(r"^[ \t]*(?:#+|//+|/?\*+/?|;+|--|%+|<!--|\"{3}|'{3})?[ \t]*", re.MULTILINE)
# A paragraph is a notice if it has one phrase for so many characters: a sentence or two.
CHARS_A_PHRASE = 300


def licence_share(text: str) -> float:
    """From 0 to 1: characters, white space aside, of paragraphs that are notices.

    Comment markers at the start of lines are no part of a text.
    """
    total = notices = 0
    for paragraph in re.split(r"\n\s*\n", MARKERS.sub("", text)):
        plain = " ".join(paragraph.split())
        total += len(plain)
        if len(plain) <= CHARS_A_PHRASE * len(PHRASES.findall(plain)):
            notices += len(plain)
    return notices / total if total else 0.0
