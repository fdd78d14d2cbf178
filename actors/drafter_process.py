"""A drafter server as a child process, for engines without Ray."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading

from ..cluster.config import DrafterConfig, EngineConfig
from ..core.errors import DrafterError

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


class DrafterProcess:
    """Runs `draftline.actors.drafter_server`, and runs it again after it died."""

    def __init__(self, config: DrafterConfig, engine: EngineConfig) -> None:
        settings = config.model_dump(exclude={"transport", "address"})
        self._command = [
            *(sys.executable, "-m", "draftline.actors.drafter_server"),
            *("--config", json.dumps(settings), "--target", engine.model),
        ]
        self._name = config.source
        self._process: subprocess.Popen[str] | None = None
        self._address = ""
        # An attempt that gave up waiting leaves its thread starting the process.
        self._starting = threading.Lock()

    async def address(self) -> str:
        """host:port, listening; starts the process if it does not run. Raises `DrafterError`."""
        return await asyncio.to_thread(self._ensure_alone)

    def stop(self) -> None:
        """End the process; twice is once."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close_pipes(self._process)
        self._process = None

    def _ensure_alone(self) -> str:
        with self._starting:
            return self._ensure()

    def _ensure(self) -> str:
        if self._process is not None and self._process.poll() is None:
            return self._address
        if self._process is not None:
            logger.warning(
                "event=drafter_died drafter=%s status=%s", self._name, self._process.returncode
            )
            self._close_pipes(self._process)
        # Its own session: Ctrl-C in the terminal reaches the engine, which ends its children.
        process = self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready port="):
            _, errors = process.communicate()
            reason = errors.strip().rpartition("\n")[2].removeprefix("drafter_server: ")
            raise DrafterError(reason or f"its process ended with status {process.returncode}")
        self._address = f"127.0.0.1:{int(line.removeprefix('ready port='))}"
        return self._address

    @staticmethod
    def _close_pipes(process: subprocess.Popen[str]) -> None:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
