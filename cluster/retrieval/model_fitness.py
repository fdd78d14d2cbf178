"""For which retrieval texts a served model is fit."""

from __future__ import annotations

from ...models.load.model_info import read_model_info
from ...models.text.fingerprint import model_hash, tokenizer_hash
from ...retrieval_store.delta.fitness import Fitness


def model_fitness(model: str) -> Fitness:
    """Fingerprints and vocabulary of a model: a folder, hub id or bundled name.

    Raises `CheckpointError`.
    """
    info = read_model_info(model)
    return Fitness(
        tokenizer_hash=tokenizer_hash(info.path),
        model_hash=model_hash(info.path),
        vocab_size=info.vocab_size,
    )
