"""Tokens that are letters, for what turns tokens into text."""

from __future__ import annotations


class Letters:
    """Token i is the i-th letter of the alphabet."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def flush(self) -> str:
        return ""
