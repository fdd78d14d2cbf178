"""What the target says of texts, and texts that it says itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ....cluster.config import EngineConfig
from ....core.arrays import Int32
from ....core.request.sampling_params import RequestOptions, SamplingParams
from ....deploy.cli.corpus.model import CorpusModel
from ....deploy.engine.engine import AsyncEngine
from ....retrieval_store.corpus.documents import TokenizedDocument
from .selection import Scored

# Documents of one scoring call.
BATCH = 64
# Requests at once, and tokens that a text of the target's own begins with.
AT_ONCE, PROMPT_LEN = 16, 16


def scored(model: CorpusModel, documents: Sequence[TokenizedDocument]) -> list[Scored]:
    """The documents, cut to the model's window, with the probability of each token."""
    corpus_scorer = model.scorer()
    windows, log_probs = corpus_scorer.windows, corpus_scorer.scorer.log_probs
    texts = [document.ids[: windows.size] for document in documents]
    found: list[Scored] = []
    for first in range(0, len(texts), BATCH):
        batch = texts[first : first + BATCH]
        for ids, said in zip(
            batch, log_probs([windows.with_bos(ids) for ids in batch]), strict=True
        ):
            probs = np.zeros(len(ids))
            # With BOS before it the first token has a probability, too.
            probs[1:] = np.exp(said[-(len(ids) - 1) :].astype(np.float64)) if len(ids) > 1 else ()
            found.append(Scored(ids.astype(np.int64), probs))
    return found


def own_texts(
    openings: Sequence[Int32], num_tokens: int, temperature: float, max_tokens: int
) -> list[Int32]:
    """About `num_tokens` that the demo target says after `openings`, each a text's first tokens."""

    async def generate() -> list[Int32]:
        config = EngineConfig(model="demo", max_num_seqs=AT_ONCE)
        texts: list[Int32] = []
        engine = AsyncEngine(config)
        try:
            await engine.start()
            for first in range(0, -(-num_tokens // max_tokens), AT_ONCE):
                batch = [opening[:PROMPT_LEN] for opening in openings[first : first + AT_ONCE]]
                params = [
                    SamplingParams(
                        temperature=temperature, seed=first + place, max_tokens=max_tokens,
                        ignore_eos=True,
                    )
                    for place in range(len(batch))
                ]  # fmt: skip
                outputs = await asyncio.gather(
                    *(
                        engine.generate(ids.tolist(), own, RequestOptions(speculative=False))
                        for ids, own in zip(batch, params, strict=True)
                    )
                )
                texts += [np.array(output.token_ids, dtype=np.int32) for output in outputs]
        finally:
            await engine.close()
        return texts

    return asyncio.run(generate())
