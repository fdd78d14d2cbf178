"""The page of a request's life lists the files that one passes: these and no others."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import draftline
import httpx
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.engine.engine import AsyncEngine
from draftline.deploy.settings.settings import ServerConfig

ROOT = Path(draftline.__file__).parent
PAGE = ROOT / "docs" / "flow.md"
BODY = {"prompt": "x = 1\nx = 1\n", "max_tokens": 24, "temperature": 0, "stream": True}
# They run beside requests, now and then.
BESIDE = {"cluster/links/failures.py"}


class FileRecorder:
    """Records the files of this package whose functions run, on every thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_on and event == "call":
            self.files.add(frame.f_code.co_filename)

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Also on threads that start within."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def passed(self) -> set[str]:
        """The files by their names within the package, without its folders' first lines."""
        inside = (Path(name) for name in self.files if name.startswith(f"{ROOT}/"))
        names = {str(path.relative_to(ROOT)) for path in inside}
        return {name for name in names if not name.startswith(("tests/", ".venv/"))} - BESIDE


def listed() -> set[str]:
    """The files of the page's table."""
    table = PAGE.read_text("utf-8").split("## One streamed request", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([\w/]+)/` \| ([^|]*) \|", table, re.MULTILINE)
    return {
        f"{folder}/{name}.py" for folder, names in rows for name in re.findall(r"`(\w+)`", names)
    }


async def test_the_page_lists_the_files_that_a_streamed_request_passes() -> None:
    recorder = FileRecorder()
    config = EngineConfig(model="demo", drafters=(DrafterConfig(kind="prompt_lookup"),))
    with recorder.everywhere():
        engine = AsyncEngine(config)
        app = create_app(LocalEngineClient(engine), ServerConfig(), "demo")
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            await client.post("/v1/completions", json=BODY)
            recorder.is_on = True
            response = await client.post("/v1/completions", json=BODY)
            recorder.is_on = False
    assert response.text.endswith("data: [DONE]\n\n")
    passed = recorder.passed()
    assert passed == listed()
    said = re.search(r"(\d+)\s+files whose functions run", PAGE.read_text("utf-8"))
    assert said is not None
    assert int(said[1]) == len(passed)
