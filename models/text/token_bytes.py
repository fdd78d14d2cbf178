"""The bytes of single tokens, which may be parts of characters."""

from __future__ import annotations

from llguidance import LLTokenizer
from transformers import PreTrainedTokenizerBase


class TokenBytes:
    """Looks tokens of one tokenizer up; prepared at the first look-up."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._prepared: LLTokenizer | None = None
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """UTF-8 bytes of a token; those of its decoded text where the tokenizer is a slow one."""
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._find(token_id)
        return text

    def _find(self, token_id: int) -> bytes:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or token_id >= len(self._tokenizer):
            return str(self._tokenizer.decode([token_id])).encode()
        if self._prepared is None:
            self._prepared = LLTokenizer(backend.to_str())
        return self._prepared.decode_bytes([token_id])
