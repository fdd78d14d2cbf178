"""Routes that clients of other servers ask for, and what to tell them."""

from __future__ import annotations

from http import HTTPStatus

from ..errors import ApiError

SERVED = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /tokenize, /detokenize"
# First parts of paths, below /v1 or not.
NOT_SERVED = {
    "embeddings": "embeddings",
    "embed": "embeddings",
    "pooling": "pooling",
    "classify": "classification",
    "score": "scores",
    "rerank": "reranking",
    "audio": "audio",
    "images": "images",
    "videos": "videos",
    "moderations": "moderation",
    "files": "files",
    "uploads": "files",
    "batches": "batches",
    "fine_tuning": "fine-tuning",
    "assistants": "assistants",
    "threads": "assistants",
    "conversations": "conversations",
    "vector_stores": "vector stores",
    "realtime": "realtime sessions",
    "messages": "Anthropic's API",
    "generate": "SGLang's own API",
}


def no_such_route(method: str, path: str) -> ApiError:
    """404 for a path that no route has, which says what this server does."""
    parts = [part for part in path.split("/") if part not in ("", "v1", "v2")]
    what = NOT_SERVED.get(parts[0]) if parts else None
    if what is None:
        message = f"there is no {method} {path[:200]!r}; this server has {SERVED}"
    else:
        message = f"{what}: not served here; this server generates text, with {SERVED}"
    return ApiError(HTTPStatus.NOT_FOUND, message)
