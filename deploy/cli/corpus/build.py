"""`draftline corpus build` and `add`: documents as tokens of the store's model, scored and kept.

Of a chat, rendered by the model's template, only the answers are scored.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from jinja2 import TemplateError
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from ....cluster.config import EngineConfig
from ....cluster.engine.assembly import ModelPlan, local_pipeline, plan_model
from ....cluster.pipeline.scorer import PipelineScorer
from ....core.arrays import Bool, Int32, Int64
from ....core.errors import ConfigError
from ....core.progress import Progress, unseen
from ....models.text.fingerprint import model_hash, tokenizer_hash
from ....models.text.tokenizer import load_tokenizer
from ....retrieval_store.corpus.build import BuildSettings, CorpusReport, Refinement, build_corpus
from ....retrieval_store.corpus.documents import (
    Chat,
    Document,
    DocumentRules,
    Span,
    TokenizedDocument,
    Unreadable,
    read_documents,
)
from ....retrieval_store.corpus.refine import Windows
from ....retrieval_store.corpus.scoring import CorpusScorer, ScoreJournal
from ....retrieval_store.corpus.selection import resolve_selection
from ....retrieval_store.delta.settings import Fingerprint
from ....retrieval_store.store import SegmentStore
from ...ray_serve.runtime import quiet_libraries
from ..progress import progress
from .command import CorpusJob


def render_chats(
    entries: Iterable[Document | Chat | Unreadable], tokenizer: Any, model: str
) -> Iterator[Document | Unreadable]:
    """The entries with a document in place of every chat.

    A chat that the template refuses, or whose answers it changes, is `Unreadable`. Raises
    `ConfigError` at the first chat if the model has no chat template.
    """
    for entry in entries:
        if not isinstance(entry, Chat):
            yield entry
            continue
        if not tokenizer.chat_template:
            raise ConfigError(
                "input",
                f"{entry.name} is a chat, but the model {model} has no chat template; "
                "give texts, or a model that has one",
            )
        yield _render(entry, tokenizer)


def _render(chat: Chat, tokenizer: Any) -> Document | Unreadable:
    turns = [{"role": message.role, "content": message.content} for message in chat.messages]
    try:
        text = _text(tokenizer, turns)
        answers = _answers(tokenizer, turns, text)
    except TemplateError:
        return Unreadable(chat.name, "refused by the chat template")
    if answers is None:
        return Unreadable(chat.name, "answer changed by the chat template")
    return Document(chat.name, text, answers)


def _answers(tokenizer: Any, turns: list[dict[str, str]], text: str) -> tuple[Span, ...] | None:
    """Places of the assistant's texts; None if the template changes one of them."""
    spans: list[Span] = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        # What stands before an answer is what the model is asked with, up to where the template
        # treats earlier turns otherwise than the last one.
        asked = _text(tokenizer, turns[:index], generate=True) if index else ""
        begin = max(_shared(asked, text), spans[-1].stop if spans else 0)
        answer = turn["content"].strip()
        start = text.find(answer, begin)
        if start < 0:
            return None
        spans.append(Span(start, start + len(answer)))
    return tuple(spans)


def _shared(first: str, second: str) -> int:
    """The number of equal first characters."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _text(tokenizer: Any, turns: list[dict[str, str]], *, generate: bool = False) -> str:
    return tokenizer.apply_chat_template(turns, add_generation_prompt=generate, tokenize=False)


# Rows of one scoring step: enough to fill a processor, few enough for its logits to fit memory.
STEP_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLimits:
    """Limits on the kept documents; see `DocumentRules` and `Refinement`.

    journal  file of scores; None: they are not kept
    """

    rules: DocumentRules = field(default_factory=DocumentRules)
    keep: int | None = None
    select: str | None = None
    max_perplexity: float | None = None
    journal: Path | None = None


@dataclass(frozen=True, slots=True)
class CorpusModel:
    """One model, opened to build stores for it. Raises `CheckpointError`."""

    plan: ModelPlan
    tokenizer: PreTrainedTokenizerBase

    def tokenize(self, document: Document) -> TokenizedDocument:
        """Token ids of a document, without a BOS that it begins with: windows bring their own.

        Raises `ConfigError` for a chat where the tokenizer does not tell a token's place.
        """
        if document.answers is None:
            encoded = self.tokenizer(document.text, add_special_tokens=False, verbose=False)
            ids = np.array(encoded["input_ids"], dtype=np.int32)
            return TokenizedDocument(ids[self._num_bos(ids) :])
        if not self.tokenizer.is_fast:
            raise ConfigError("model", "has no tokenizer.json, which chats need")
        encoded = self.tokenizer(
            document.text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        is_scored = overlaps(offsets, document.answers)
        first = self._num_bos(ids)
        return TokenizedDocument(ids[first:], is_scored[first:])

    def render(
        self, entries: Iterable[Document | Chat | Unreadable]
    ) -> Iterator[Document | Unreadable]:
        """See `render_chats`."""
        return render_chats(entries, self.tokenizer, self.plan.config.model)

    @contextmanager
    def settings(
        self, limits: DocumentLimits, *, progress: Progress = unseen
    ) -> Iterator[BuildSettings]:
        """How to build. The model is loaded to score documents only if a limit needs it."""
        path = self.plan.info.path
        fingerprint = Fingerprint(
            tokenizer_hash=tokenizer_hash(path),
            model_hash=model_hash(path),
            vocab_size=self.plan.info.vocab_size,
        )
        settings = BuildSettings(fingerprint=fingerprint, rules=limits.rules, progress=progress)
        if limits.keep is None and limits.max_perplexity is None:
            yield settings
            return
        journal = None if limits.journal is None else ScoreJournal(limits.journal)
        with journal or nullcontext():
            refinement = Refinement(
                scorer=self.scorer(journal),
                keep=limits.keep,
                select=limits.select,
                max_perplexity=limits.max_perplexity,
            )
            yield replace(settings, refinement=refinement)

    def scorer(self, journal: ScoreJournal | None = None) -> CorpusScorer:
        """Load the model, to score documents."""
        torch.set_num_threads(1)
        pipeline = local_pipeline(self.plan.specs)
        asyncio.run(pipeline.start())
        config = self.plan.config
        return CorpusScorer(
            scorer=PipelineScorer(
                pipeline, pipeline.num_blocks, config.block_size, STEP_ROWS, config.max_num_seqs
            ),
            windows=self._windows(),
            model_hash=model_hash(self.plan.info.path),
            journal=journal,
        )

    def _num_bos(self, ids: Int32) -> int:
        return int(len(ids) > 0 and ids[0] == self.plan.info.bos_token_id)

    def _windows(self) -> Windows:
        window = min(self.plan.max_model_len, STEP_ROWS)
        return Windows(window=window, overlap=window // 4, bos_id=self.plan.info.bos_token_id)


def overlaps(offsets: Int64, spans: Sequence[Span]) -> Bool:
    """offsets: int64 [n, 2], characters of each token -> bool [n], whether it is part of a span."""
    starts, stops = offsets[:, :1], offsets[:, 1:]
    begins, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    return np.any((starts < ends) & (stops > begins), axis=1)


def open_corpus_model(model: str) -> CorpusModel:
    """A folder, a hub id or a bundled name."""
    plan = plan_model(EngineConfig(model=model))
    return CorpusModel(plan, load_tokenizer(plan.info.path))


def add_corpus(
    store: SegmentStore, job: CorpusJob, console: Console, *, remove: Sequence[str] = ()
) -> None:
    """Add a job's documents to a store and `remove` segments at once. Raises `DraftlineError`."""
    if not job.inputs:
        raise ConfigError("input", "name files or folders: draftline corpus build FILES --store S")
    # Before the model is loaded.
    resolve_selection(job.select, job.keep)
    quiet_libraries()
    model = open_corpus_model(job.model)
    documents = model.render(read_documents(job.inputs))
    limits = DocumentLimits(
        rules=DocumentRules(
            min_tokens=job.min_tokens, min_compression_ratio=job.min_compression_ratio
        ),
        keep=job.keep,
        select=job.select,
        max_perplexity=job.max_perplexity,
        journal=job.journal or _journal_beside(store),
    )
    with model.settings(limits, progress=progress) as settings:
        report = build_corpus(
            store, job.namespace, documents, model.tokenize, settings, remove=remove
        )
    _print_report(report, console)
    _write(report, job, console)


def _journal_beside(store: SegmentStore) -> Path | None:
    """None for a store that is no folder."""
    if urlsplit(store.url).scheme:
        return None
    folder = Path(store.url)
    return folder.with_name(f"{folder.name}.scores")


def _print_report(report: CorpusReport, console: Console) -> None:
    if report.dropped:
        table = Table("dropped", "documents", "share", "such as", box=None, pad_edge=False)
        for reason, count in report.dropped.items():
            share = f"{count / report.num_read:.1%}"
            table.add_row(reason, f"{count:,}", share, report.examples[reason][0])
        console.print(table)
    for name, perplexities in (
        ("perplexities", report.perplexities),
        ("kept", report.kept_perplexities),
    ):
        if perplexities:
            quartiles = ", ".join(f"{value:.2f}" for value in perplexities.values())
            console.print(f"{name} (least, quartiles, most): {quartiles}")
    console.print(
        f"kept {report.num_kept} of {report.num_read} documents, {report.num_tokens:,} tokens, "
        f"{report.num_bytes:,} bytes"
    )


def _write(report: CorpusReport, job: CorpusJob, console: Console) -> None:
    if job.report is not None:
        job.report.parent.mkdir(parents=True, exist_ok=True)
        job.report.write_text(json.dumps(report.fields(), indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {job.report}")
