"""What a retrieval store needs of the model it is built for: its tokens, and its judgement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..cluster.assembly import ModelPlan, local_pipeline, plan_model
from ..cluster.config import EngineConfig
from ..cluster.pipeline_scorer import PipelineScorer
from ..core.types import Int32
from ..models.fingerprint import model_hash, tokenizer_hash
from ..models.tokenizer import load_tokenizer
from ..retrieval_store.build import BuildSettings, Refinement
from ..retrieval_store.fitness import Fitness
from ..retrieval_store.refine import Windows

# Rows of one scoring step: enough to fill a processor, few enough for its logits to fit memory.
STEP_ROWS = 4096


@dataclass(frozen=True, slots=True)
class CorpusModel:
    """One model, opened to build stores for it. Raises `CheckpointError`."""

    plan: ModelPlan
    tokenizer: PreTrainedTokenizerBase

    @property
    def tokenize(self) -> Callable[[str], Int32]:
        """Token ids of a document."""
        return lambda text: np.array(
            self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            dtype=np.int32,
        )

    def settings(
        self,
        *,
        keep: int | None = None,
        max_perplexity: float | None = None,
        show_progress: bool = False,
    ) -> BuildSettings:
        """How to build; the model is loaded and scores only if a limit is given."""
        path = self.plan.info.path
        fitness = Fitness(
            tokenizer_hash=tokenizer_hash(path),
            model_hash=model_hash(path),
            vocab_size=self.plan.info.vocab_size,
        )
        refinement = None
        if keep is not None or max_perplexity is not None:
            refinement = Refinement(
                scorer=self._scorer(),
                windows=self._windows(),
                keep=keep,
                max_perplexity=max_perplexity,
            )
        return BuildSettings(fitness=fitness, refinement=refinement, show_progress=show_progress)

    def _scorer(self) -> PipelineScorer:
        torch.set_num_threads(1)
        pipeline = local_pipeline(self.plan.specs)
        asyncio.run(pipeline.start())
        block_size = self.plan.config.block_size
        return PipelineScorer(pipeline, self.plan.num_blocks, block_size, STEP_ROWS)

    def _windows(self) -> Windows:
        window = min(self.plan.max_model_len, STEP_ROWS)
        return Windows(window=window, overlap=window // 4, bos_id=self.plan.info.bos_token_id)


def open_corpus_model(model: str) -> CorpusModel:
    """A folder, a hub id or a bundled name."""
    plan = plan_model(EngineConfig(model=model))
    return CorpusModel(plan, load_tokenizer(plan.info.path))
