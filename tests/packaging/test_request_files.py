"""The page of a request's life lists the files that one passes: these and no others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import draftline
import pytest
from support.tools.pages import sections

ROOT = Path(draftline.__file__).parent
PAGE = ROOT / "docs" / "how-it-works.md"
RECORD = ROOT / "tests" / "support" / "tools" / "record_request_files.py"
# Not ours, what runs it, and what runs beside requests now and then.
BESIDE = (".venv/", "tests/", "cluster/links/failures.py", "deploy/api/http/gate.py")


def listed() -> set[str]:
    """The files of the page's table."""
    table = sections(PAGE, level=3)["One streamed request, file by file"]
    rows = re.findall(r"^\| `([\w/]+)/` \| ([^|]*) \|", table, re.MULTILINE)
    return {
        f"{folder}/{name}.py" for folder, names in rows for name in re.findall(r"`(\w+)`", names)
    }


# With a cold cache of compiled loops.
@pytest.mark.timeout(600)
def test_the_page_lists_the_files_that_a_streamed_request_passes() -> None:
    run = subprocess.run([sys.executable, RECORD], capture_output=True, text=True, check=True)
    passed = {name for name in run.stdout.split() if not name.startswith(BESIDE)}
    missing, gone = passed - listed(), listed() - passed
    assert not missing | gone, f"add {sorted(missing)}; take out {sorted(gone)}"
