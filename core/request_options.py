"""How a request is served, beside what it asks for."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import RequestError

MAX_PRIORITY = 2**31 - 1
MAX_SALT_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Changes when and how fast an answer comes, never its text.

    namespace    whose retrieval data and KV prefixes it may use: `shared` or a tenant's
    priority     requests of a lower number go first, and give up their KV last
    cache_salt   KV, and what drafters learn, is shared only among requests of the same namespace
                 and salt
    store        whether drafters may learn from it for later requests
    speculative  whether drafters are asked
    max_nodes    most nodes of its tree; None: the engine's limit
    drafters     whose proposals it takes, by name, of those that the node budget asks; None:
                 everyone's

    Raises `RequestError` naming the field.
    """

    namespace: str = "shared"
    priority: int = 0
    cache_salt: str = ""
    store: bool = True
    speculative: bool = True
    max_nodes: int | None = None
    drafters: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if abs(self.priority) > MAX_PRIORITY:
            raise RequestError("priority", f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}")
        if self.max_nodes is not None and self.max_nodes < 0:
            raise RequestError("speculative.max_tokens", "must be 0 or more")
        if len(self.cache_salt) > MAX_SALT_CHARS:
            raise RequestError("cache_salt", f"must have at most {MAX_SALT_CHARS} characters")
