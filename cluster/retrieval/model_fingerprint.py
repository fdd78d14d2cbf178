"""For which retrieval texts a served model is fit."""

from __future__ import annotations

from ...models.load.model_info import read_model_info
from ...models.text.fingerprint import model_hash, tokenizer_hash
from ...retrieval_store.delta.fingerprint import Fingerprint


def model_fingerprint(model: str) -> Fingerprint:
    """Fingerprints and vocabulary of a model: a folder, hub id or bundled name.

    Raises `CheckpointError`.
    """
    info = read_model_info(model)
    return Fingerprint(
        tokenizer_hash=tokenizer_hash(info.path),
        model_hash=model_hash(info.path),
        vocab_size=info.vocab_size,
    )
