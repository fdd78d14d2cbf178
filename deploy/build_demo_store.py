"""Makes the bundled retrieval store: `python -m draftline.deploy.build_demo_store`.

Sources that the demo models were trained on, cut into documents, scored by the demo target; those
of the lowest perplexity stay (SPECTRA-RETRIEVAL). Held-out files are left out, as in training.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import torch
import typer

from ..cluster.assembly import local_pipeline, plan_model
from ..cluster.config import EngineConfig
from ..cluster.pipeline_scorer import PipelineScorer
from ..core.types import Int32
from ..models.bundled import DEMO_STORE
from ..models.fingerprint import model_hash, tokenizer_hash
from ..models.tokenizer import load_tokenizer
from ..retrieval_store.build import BuildSettings, Fitness, Refinement, build_corpus
from ..retrieval_store.directory_store import DirectoryStore
from ..retrieval_store.documents import Document
from ..retrieval_store.refine import Windows
from ..training.corpus import SourceFile, training_files

NAMESPACE = "shared"
# Files are cut at empty lines into documents of about this many characters: a function or two.
DOCUMENT_CHARS = 1500
STEP_ROWS = 4096
OVERLAP = 256


def main(
    every: Annotated[int, typer.Option(help="Score one document in so many.")] = 3,
    keep: Annotated[int, typer.Option(help="Documents that stay.")] = 1000,
) -> None:
    """Score, keep the lowest perplexities, write the store in place of the old one."""
    torch.set_num_threads(1)
    plan = plan_model(EngineConfig(model="demo"))
    pipeline = local_pipeline(plan.specs)
    asyncio.run(pipeline.start())
    scorer = PipelineScorer(pipeline, plan.num_blocks, plan.config.block_size, STEP_ROWS)
    tokenizer = load_tokenizer(plan.info.path)

    def tokenize(text: str) -> Int32:
        return np.array(tokenizer(text, verbose=False)["input_ids"], dtype=np.int32)

    settings = BuildSettings(
        fitness=Fitness(
            tokenizer_hash=tokenizer_hash(plan.info.path),
            model_hash=model_hash(plan.info.path),
            vocab_size=plan.info.vocab_size,
        ),
        refinement=Refinement(
            scorer=scorer,
            windows=Windows(
                window=plan.max_model_len, overlap=OVERLAP, bos_id=plan.info.bos_token_id
            ),
            keep=keep,
        ),
        show_progress=True,
    )
    documents = [document for file in training_files() for document in _cut(file)][::every]
    if DEMO_STORE.exists():
        shutil.rmtree(DEMO_STORE)
    report = build_corpus(DirectoryStore(DEMO_STORE), NAMESPACE, documents, tokenize, settings)
    typer.echo(
        f"kept {report.num_kept} of {report.num_read} documents, {report.num_tokens} tokens, "
        f"{report.num_bytes} bytes; dropped {report.dropped}; perplexities {report.perplexities}, "
        f"kept {report.kept_perplexities}"
    )


def _cut(file: SourceFile) -> Iterator[Document]:
    """Documents of whole paragraphs, in order."""
    text = ""
    for paragraph in file.text.split("\n\n"):
        text = f"{text}\n\n{paragraph}" if text else paragraph
        if len(text) >= DOCUMENT_CHARS:
            yield Document(file.name, text)
            text = ""
    if text:
        yield Document(file.name, text)


if __name__ == "__main__":
    typer.run(main)
