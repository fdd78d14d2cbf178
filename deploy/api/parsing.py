"""Reading a body as a request without holding up other requests."""

from __future__ import annotations

from typing import TypeVar

from ...cluster.loop_calls import off_loop
from ..request_models import RequestModel
from .schema.limits import RequestLimits

RequestT = TypeVar("RequestT", bound=RequestModel)

# Reading and checking so many bytes takes about a millisecond.
INLINE_BYTES = 16_384


async def parse_body(
    kind: type[RequestT], data: bytes, limits: RequestLimits, *, ignore_unknown: bool = False
) -> RequestT:
    """The body as a request of this kind. Raises as `RequestModel.parse`."""
    if len(data) <= INLINE_BYTES:
        return kind.parse(data, limits, ignore_unknown=ignore_unknown)
    return await off_loop(kind.parse, data, limits, ignore_unknown=ignore_unknown)
