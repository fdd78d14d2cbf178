"""The site of the pages: its menu names every page, and links go along with files."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import draftline
import pytest

ROOT = Path(draftline.__file__).parent
# The file has a tag of Python's, which a safe reader refuses.
MENU = re.compile(r"(?m)^ +- ([\w/.-]+\.md)$")


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    """The pages as `make docs` stages them."""
    script = runpy.run_path(str(ROOT / "scripts" / "stage_pages.py"))
    script["main"](tmp_path / "pages")
    return tmp_path / "pages"


def test_the_menu_names_pages(staged: Path) -> None:
    pages = MENU.findall((ROOT / "mkdocs.yml").read_text("utf-8"))
    on_disk = {page.relative_to(staged).as_posix() for page in staged.rglob("*.md")}
    assert set(pages) == on_disk


def test_links_lead_to_the_same_on_the_site(staged: Path) -> None:
    assert (staged / "benchmarks" / "results" / "lossless.json").is_file()
    assert (staged / "docs" / "peers.png").is_file()
    assert "](index.md)" not in (staged / "index.md").read_text("utf-8")
    assert "README.md" not in "".join(
        re.findall(r"\]\(([^)]*)\)", (staged / "docs" / "migration.md").read_text("utf-8"))
    )
