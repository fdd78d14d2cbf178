"""The method `Check` of gRPC's health protocol (grpc.health.v1), for probes of any make."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import grpc.aio

HEALTH_METHOD = "/grpc.health.v1.Health/Check"
SERVICE, _, METHOD_NAME = HEALTH_METHOD.strip("/").partition("/")
# HealthCheckResponse has one field, `status`, number 1: SERVING is 1, NOT_SERVING is 2.
SERVING = b"\x08\x01"
NOT_SERVING = b"\x08\x02"


def health_handler(is_serving: Callable[[], bool]) -> grpc.GenericRpcHandler:
    """Answers for the process as a whole, whatever service a probe asks for."""

    async def check(_request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        return SERVING if is_serving() else NOT_SERVING

    handler = grpc.unary_unary_rpc_method_handler(check)
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD_NAME: handler})
