"""What the target says of texts, and texts that it says itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ....cluster.config import EngineConfig
from ....core.arrays import Int32
from ....core.request.sampling_params import RequestOptions, SamplingParams
from ....deploy.cli.corpus.model import CorpusModel
from ....deploy.engine.async_engine import AsyncEngine
from ....retrieval_store.corpus.documents import TokenizedDocument
from ....retrieval_store.corpus.refine import Score

# Requests at once, and tokens that a text of the target's own begins with.
AT_ONCE, PROMPT_LEN = 16, 16


def scored(
    model: CorpusModel, documents: Sequence[TokenizedDocument]
) -> tuple[list[TokenizedDocument], list[Score]]:
    """The documents, cut to the model's window, and their scores, with `token_probs`."""
    scorer = model.scorer()
    texts = [TokenizedDocument(document.ids[: scorer.windows.size]) for document in documents]
    return texts, scorer.scores(texts, lambda _: None, with_probs=True)


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
