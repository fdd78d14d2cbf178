"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DEADLINE_S = 60.0
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-port=0", "--hide-scrollbars", "about:blank",
)  # fmt: skip
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), " ": (32, " "), "ArrowLeft": (37, "")}
# Bits of the protocol's `modifiers`.
CONTROL, SHIFT = 2, 8


class Page:
    """The one page of a browser. `errors`: what its console was told, and what it threw."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call the protocol; events that come meanwhile are read for errors."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(DEADLINE_S))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", details).get("description", "thrown"))
        if event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url')}")

    def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + DEADLINE_S
        while not self.evaluate(script):
            assert time.monotonic() < end, f"never true: {script}; {self.errors}"
            time.sleep(0.05)

    def show(
        self, width: int, height: int = 900, *, scheme: str = "light", motion: str = "reduce"
    ) -> None:
        """The size of the page, and what its user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": name, "value": value} for name, value in features.items()],
        )

    def open(self, url: str) -> None:
        """Go to an address."""
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer["errorText"]
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key, down and up."""
        code, text = KEYS[key]
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        down = named | ({"text": text} if text and not modifiers else {})
        self.call("Input.dispatchKeyEvent", type="keyDown", **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def write(self, text: str) -> None:
        """Text where the focus is."""
        self.call("Input.insertText", text=text)

    def picture(self, file: Path, height: int | None = None) -> None:
        """A PNG of the whole page, or of so much of its top."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"]}
        data = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip=clip | {"scale": 1}
        )
        file.write_bytes(base64.b64decode(data["data"]))


@contextmanager
def browser() -> Iterator[Page]:
    """A page of a new browser, which ends with the block."""
    assert CHROMIUM is not None
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [CHROMIUM, f"--user-data-dir={folder}", *FLAGS]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with connect(_page_address(Path(folder)), max_size=None) as connection:
                page = Page(connection)
                yield page
                page.call("Browser.close")
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait()


def _page_address(folder: Path) -> str:
    """The address of the first page, once the browser has said its port."""
    said = folder / "DevToolsActivePort"
    end = time.monotonic() + DEADLINE_S
    while not said.exists() or len(said.read_text().splitlines()) < 2:
        assert time.monotonic() < end, "the browser does not start"
        time.sleep(0.05)
    port = said.read_text().splitlines()[0]
    with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        targets = json.load(answer)
    return next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page")
