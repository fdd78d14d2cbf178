"""Refuses calls that show no token of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from ...cluster.links.tokens import Access
from .health_check import HEALTH_METHOD

REASON = "a bearer token of this server is needed: token_env or token_file in the client's settings"


class TokenCheck(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED before a handler sees the call; health checks need no token."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's own handler, or one that refuses."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method == HEALTH_METHOD:
            return handler
        if self._access.scope(handler_call_details.invocation_metadata) is not None:
            return handler
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(_refuse_stream)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(_request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REASON)
    return b""


async def _refuse_stream(
    _requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
) -> AsyncIterator[bytes]:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REASON)
    yield b""
