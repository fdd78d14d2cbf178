"""The sizing guide has the table that its command prints."""

from __future__ import annotations

from pathlib import Path

import draftline
from draftline.measure.simulate.sizing_table import markdown

PAGE = Path(draftline.__file__).parent / "docs" / "sizing.md"


def test_the_table_is_what_doctor_prints() -> None:
    assert markdown() in PAGE.read_text("utf-8")
