"""Prints the files of the package whose functions run while a streamed request is answered.

A process of its own: threads that were there before would not be seen.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType

import draftline
import httpx
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.engine.async_engine import AsyncEngine
from draftline.deploy.settings.settings import ServerConfig

ROOT = Path(draftline.__file__).parent
BODY = {"prompt": "x = 1\nx = 1\n", "max_tokens": 24, "temperature": 0, "stream": True}


class FileRecorder:
    """Records the files whose functions run, on every thread that starts from now on."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_on = False
        threading.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.is_on and event == "call":
            self.files.add(frame.f_code.co_filename)


async def answer(recorder: FileRecorder) -> None:
    """Record the second of two answers: the first one warms up."""
    config = EngineConfig(
        model="demo", drafters=(DrafterConfig(kind="prompt_lookup"),), compile="off"
    )
    app = create_app(LocalEngineClient(AsyncEngine(config)), ServerConfig(), "demo")
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        await client.post("/v1/completions", json=BODY)
        recorder.is_on = True
        response = await client.post("/v1/completions", json=BODY)
        recorder.is_on = False
    assert response.text.endswith("data: [DONE]\n\n")


if __name__ == "__main__":
    recorder = FileRecorder()
    thread = threading.Thread(target=lambda: asyncio.run(answer(recorder)))
    thread.start()
    thread.join()
    inside = (Path(name) for name in recorder.files if name.startswith(f"{ROOT}/"))
    sys.stdout.writelines(f"{path.relative_to(ROOT)}\n" for path in sorted(inside))
