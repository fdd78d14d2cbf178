"""Texts and regular expressions as literals of llguidance's Lark."""

from __future__ import annotations

import json
import re

_ESCAPED_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)


def lark_text(text: str) -> str:
    """A text as a literal: a JSON string, but for U+007F, which Lark takes escaped only."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def lark_choice(texts: list[str]) -> str:
    """The body of a rule for one of some texts."""
    return " | ".join(map(lark_text, texts))


def lark_regex(expression: str) -> str:
    """A regular expression as a literal: between slashes, so its own ones are escaped."""
    escaped = _ESCAPED_OR_SLASH.sub(lambda part: part[0] if part[0] != "/" else r"\/", expression)
    return f"/{escaped}/"
