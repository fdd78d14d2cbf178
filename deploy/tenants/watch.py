"""Follows a tenant store; while it fails, the last good state stays."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ...core.errors import ConfigError, StoreError
from ..settings.tenants import TenantConfig
from .store import TenantStore, checked_tenants

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
# Period of a repeated warning.
LOG_PERIOD_S = 60.0


class TenantWatch:
    """Polls a store once a second. One event loop uses it; reading does not block it.

    on_tenants  gets the tenants after each change; what it raises (`ConfigError`) is taken as the
                store's fault, and the state before stays
    on_failure  called for each look that failed
    """

    def __init__(
        self,
        store: TenantStore,
        on_tenants: Callable[[Sequence[TenantConfig]], object],
        on_failure: Callable[[], object],
    ) -> None:
        self._store = store
        self._on_tenants = on_tenants
        self._on_failure = on_failure
        self._version: object = None
        self._task: asyncio.Task[None] | None = None
        self._complaint = ""
        self._complained_at = 0.0
        # Whether the store could be read once: until then its tenants are unknown.
        self.is_known = False

    async def start(self) -> None:
        """Poll once, then regularly."""
        await self.look()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def look(self) -> None:
        """Poll once."""
        try:
            found = await asyncio.to_thread(self._read)
            if found is None:
                return
            version, tenants = found
            self._on_tenants(tenants)
        except (StoreError, ConfigError) as error:
            self._on_failure()
            self._complain(str(error))
            return
        if self.is_known or self._complaint:
            logger.info(
                "event=tenants_changed store=%s tenants=%d", self._store.where, len(tenants)
            )
        self._version, self.is_known, self._complaint = version, True, ""

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look()

    def _read(self) -> tuple[object, tuple[TenantConfig, ...]] | None:
        """The tenants with their version; None where it is the known one."""
        # Before the content: a change in between is found by the next look.
        version = self._store.version()
        if self.is_known and version == self._version and not self._complaint:
            return None
        return version, checked_tenants(self._store.read(), self._store.where)

    def _complain(self, reason: str) -> None:
        now = time.monotonic()
        if reason == self._complaint and now - self._complained_at < LOG_PERIOD_S:
            return
        self._complaint, self._complained_at = reason, now
        kept = "the last good state stays" if self.is_known else "its tenants get 503"
        logger.error("event=tenant_store_failed reason=%r consequence=%r", reason, kept)
