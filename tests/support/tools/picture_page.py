"""Takes pictures of the page at /ui of a running server; docs/serving.md shows `ui-light.png`.

PYTHONPATH=tests python -m support.tools.picture_page http://127.0.0.1:8000 KEY build/pictures
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from PIL import Image
from support.servers.browser import CONTROL, Page, browser

PROMPT = (
    "class Calendar(object):\n"
    '    """\n'
    "    Base calendar class. It simply provides data to subclasses.\n"
    '    """\n\n'
    "    def __init__(self, firstweekday=0):"
)
FIELDS = {"prompt": PROMPT, "temperature": 0.5, "seed": 7, "max-tokens": 120}
# The step with most nodes among those of which several were accepted.
BEST_STEP = """
(() => {
  const step = document.getElementById("step");
  let best = [0, 0];
  for (let place = 0; place <= Number(step.max); place += 1) {
    step.value = place;
    step.dispatchEvent(new Event("input"));
    const drafted = document.querySelectorAll("#tree .node:not(.s0)").length;
    const taken = document.querySelectorAll("#tree .node.taken:not(.s0)").length;
    if (taken > 2 && taken < 9 && drafted > best[1]) best = [place, drafted];
  }
  step.value = best[0];
  step.dispatchEvent(new Event("input"));
})()
"""
VIEWS = {"ui-light": (1200, "light"), "ui-dark": (1200, "dark"), "ui-phone": (360, "dark")}


def run(page: Page) -> None:
    """Run the prompt, and wait for both answers."""
    page.evaluate("document.getElementById('status').textContent = ''")
    page.evaluate("document.getElementById('prompt').focus()")
    page.press("Enter", CONTROL)
    page.wait_for("document.getElementById('status').textContent.startsWith('Done')")


def take(page: Page, url: str, key: str, folder: Path) -> None:
    """Open the page, run a prompt twice (the first time things are compiled), and take pictures."""
    page.show(1200)
    page.open(f"{url}/ui")
    if key:
        page.wait_for("document.activeElement.id === 'key'")
        page.write(key)
        page.press("Enter")
    page.wait_for("!document.getElementById('page').hidden")
    for name, value in FIELDS.items():
        page.evaluate(f"document.getElementById('{name}').value = {json.dumps(value)}")
    run(page)
    run(page)
    page.evaluate(BEST_STEP)
    for name, (width, scheme) in VIEWS.items():
        page.show(width, scheme=scheme)
        page.evaluate("new Promise((done) => setTimeout(done, 500))")
        file = folder / f"{name}.png"
        page.picture(file)
        with Image.open(file) as picture:
            picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with browser() as page:
        take(page, given.url, given.key, given.folder)


if __name__ == "__main__":
    main()
