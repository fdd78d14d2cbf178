"""A drafter server as a child process, for engines without Ray."""

from __future__ import annotations

import json
import logging
import threading

from ..cluster.config import DrafterConfig, EngineConfig
from ..cluster.links.access import new_token
from ..cluster.loop_calls import in_daemon_thread
from ..core.errors import DrafterError
from .child_server import ChildServer

logger = logging.getLogger(__name__)

MODULE = "draftline.actors.drafter_server"
# Start-up timeouts. A drafter imports its libraries and loads its model or store. The first start
# may read the model from a slow disk; a restart must be faster.
START_TIMEOUT_S = 300.0
RESTART_TIMEOUT_S = 60.0


class DrafterProcess:
    """Runs `draftline.actors.drafter_server`, and restarts it after a crash or a timeout.

    token  that calls must carry; None: a new one is generated
    """

    def __init__(
        self,
        config: DrafterConfig,
        engine: EngineConfig,
        token: str | None = None,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        restart_timeout_s: float = RESTART_TIMEOUT_S,
    ) -> None:
        self.token = token or new_token()
        left_out = {"transport", "address", "drafter_pool", "servers"}
        self._settings = json.dumps(config.model_dump(exclude=left_out))
        self._target = engine.model
        self._name = config.source
        self._timeout_s = start_timeout_s
        self._restart_timeout_s = restart_timeout_s
        self._child: ChildServer | None = None
        self._address = ""
        self._is_stopped = False
        # An attempt that timed out leaves its thread, which still starts the process.
        self._starting = threading.Lock()

    async def address(self) -> str:
        """host:port, listening; starts the process if it does not run. Raises `DrafterError`."""
        # In a separate thread: a hanging start must not occupy a thread of the shared pool.
        await in_daemon_thread(self._ensure)
        return self._address

    async def replace(self) -> None:
        """End an unresponsive process; `address` starts another."""
        await in_daemon_thread(self._give_up)

    def stop(self) -> None:
        """End the process for good; may be called twice."""
        self._is_stopped = True
        if self._child is not None:
            self._child.stop()

    def _give_up(self) -> None:
        child = self._child
        if child is not None:
            logger.warning("event=drafter_given_up drafter=%s pid=%d", self._name, child.pid)
            child.kill()

    def _ensure(self) -> None:
        with self._starting:
            child = self._child
            if child is None or child.status is not None or not self._address:
                if child is not None and child.status is not None:
                    logger.warning(
                        "event=drafter_died drafter=%s status=%s", self._name, child.status
                    )
                    child.kill()
                self._address = ""
                self._start()

    def _start(self) -> None:
        if self._is_stopped:
            raise DrafterError("its engine is closed")
        arguments = ("--config", "-", "--end-with-stdin", "--target", self._target)
        self._child = child = ChildServer(self._name, MODULE, arguments, self._settings, self.token)
        timeout_s, self._timeout_s = self._timeout_s, self._restart_timeout_s
        port = child.wait_ready(timeout_s)
        if self._is_stopped:
            # `stop` may have run before the process existed.
            child.stop()
            raise DrafterError("its engine is closed")
        self._address = f"127.0.0.1:{port}"
