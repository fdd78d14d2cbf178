"""Links between the pages, and files that they name: what they point to exists, headings too."""

from __future__ import annotations

import re
from pathlib import Path

import draftline

ROOT = Path(draftline.__file__).parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"(?ms)^```.*?^```")
HEADING = re.compile(r"(?m)^#{1,6} (.+)$")
FILE = re.compile(
    r"`((?:cluster|core|drafters|kernels|models|retrieval_store|tests)/[\w/]+(?:\.py)?)`"
)
ELSEWHERE = ("http://", "https://", "mailto:")


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    found: list[str] = []
    for heading in HEADING.findall(FENCE.sub("", page.read_text("utf-8"))):
        text = LINK.sub("", heading).replace("[", "").lower()
        name = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return set(found)


def broken(page: Path) -> list[str]:
    """The links of a page to files or headings that are not there."""
    links = LINK.findall(FENCE.sub("", page.read_text("utf-8")))
    missing = []
    for link in links:
        if link.startswith(ELSEWHERE):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_page = target.suffix == ".md"
        if not target.exists() or (anchor and is_page and anchor not in anchors(target)):
            missing.append(link)
    return missing


def test_relative_links_lead_somewhere() -> None:
    assert PAGES
    found = {str(page.relative_to(ROOT)): broken(page) for page in PAGES}
    assert not {page: links for page, links in found.items() if links}


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Some `words`, here\n[a](#some-words-here) [b](#other) [c](none.md)\n")
    assert broken(page) == ["#other", "none.md"]


def test_files_that_the_pages_name_are_there() -> None:
    named = {name for page in PAGES for name in FILE.findall(page.read_text("utf-8"))}
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
