"""Copies the pages, and the files that they link to, to `build/pages`, as they lie here.

So links are the same in the repository and on the site, and `mkdocs build --strict` checks them.
A link to a folder, which a site has no page for, becomes one to its name alone.
"""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGED = ROOT / "build" / "pages"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
ELSEWHERE = ("http://", "https://", "mailto:")
# The front page of a site.
NAMES = {"README.md": "index.md"}


def main(staged: Path = STAGED) -> None:
    """Stage everything anew."""
    shutil.rmtree(staged, ignore_errors=True)
    for page in PAGES:
        target = staged / _staged(page.relative_to(ROOT))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(LINK.sub(partial(_link, staged, page), page.read_text("utf-8")))


def _staged(path: Path) -> Path:
    return path if path.parent != Path() else Path(NAMES.get(path.name, path.name))


def _link(staged: Path, page: Path, link: re.Match[str]) -> str:
    """The link as it stands on the site; its file goes along."""
    text, address, anchor = link[1], link[2], link[3] or ""
    if address.startswith(ELSEWHERE):
        return link[0]
    target = (page.parent / address).resolve()
    if target.is_dir():
        return text
    if target.is_file() and target.suffix != ".md":
        copy = staged / target.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(target, copy)
    if target == ROOT / "README.md":
        address = f"{address.removesuffix('README.md')}index.md"
    return f"[{text}]({address}{anchor})"


if __name__ == "__main__":
    main()
