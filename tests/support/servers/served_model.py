"""`draftline serve` in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

COMMAND = (sys.executable, "-c", "from draftline.deploy.cli.main import main; main()")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The server's process, what it printed until it was ready, its URL, ending in `/v1`, and the
    command that it offers."""

    process: subprocess.Popen[str]
    lines: list[str]
    url: str
    curl: str


@contextmanager
def served_model(*arguments: str) -> Iterator[ServedModel]:
    """`draftline serve` with these arguments at a free port; killed at the end if it still runs."""
    with subprocess.Popen(
        [*COMMAND, "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        try:
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("curl "):
                    break
            *lines, curl = lines
            found = re.search(r"ready: (http://\S+/v1)", lines[-1])
            assert found, lines
            yield ServedModel(process, lines, found[1], curl)
        finally:
            process.kill()
