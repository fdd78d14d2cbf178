from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from draftline.core.arrays import Float32, Int32
from draftline.core.errors import ConfigError
from draftline.retrieval_store.corpus.build import BuildSettings, Refinement, build_corpus
from draftline.retrieval_store.corpus.documents import (
    Document,
    DocumentRules,
    TokenizedDocument,
    Unreadable,
)
from draftline.retrieval_store.corpus.refine import Windows
from draftline.retrieval_store.corpus.scoring import CorpusScorer
from draftline.retrieval_store.corpus.selection import SELECTIONS
from draftline.retrieval_store.delta.settings import Fingerprint
from draftline.retrieval_store.directory_store.store import DirectoryStore
from draftline.retrieval_store.serving.service import RetrievalService
from support.fakes.recorded_progress import RecordedProgress
from support.inputs.segments import context

FINGERPRINT = Fingerprint(tokenizer_hash="tokenizer", model_hash="model", vocab_size=256)
RULES = DocumentRules(min_tokens=3)
WINDOWS = Windows(window=64, overlap=8)


def tokenize(document: Document) -> TokenizedDocument:
    return TokenizedDocument(np.frombuffer(document.text.encode(), np.uint8).astype(np.int32))


class LikesLowBytes:
    """Perplexity is exp(mean byte / 100)."""

    def log_probs(self, documents: Sequence[Int32]) -> list[Float32]:
        return [(-d[1:] / 100).astype(np.float32) for d in documents]


SCORER = CorpusScorer(scorer=LikesLowBytes(), windows=WINDOWS, model_hash="model")


DOCUMENTS = [
    Document("good", "aaab"),
    Document("copy", "aaab "),
    Unreadable("broken", "not UTF-8"),
    Document("short", "a"),
    Document("better", "0001"),
    Document("worst", "zzzy"),
]


def test_the_lowest_perplexities_are_stored(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    refinement = Refinement(scorer=SCORER, keep=2, select="lowest")
    settings = BuildSettings(fingerprint=FINGERPRINT, rules=RULES, refinement=refinement)
    report = build_corpus(store, "n", iter(DOCUMENTS), tokenize, settings)
    assert report.num_read == 6
    assert report.dropped == {"duplicate": 1, "not UTF-8": 1, "too short": 1, "perplexity": 1}
    assert (report.num_kept, report.num_tokens) == (2, 8)
    assert tuple(store.manifest().segment_ids("n")) == report.segment_ids
    assert report.num_bytes == sum(store.manifest().sizes["n"].values())
    assert report.examples["perplexity"] == ["worst"]
    assert report.examples["not UTF-8"] == ["broken"]
    assert report.kept_perplexities[1.0] < report.perplexities[1.0]
    assert list(report.perplexities.values()) == sorted(report.perplexities.values())
    assert len(report.scored) == 3
    assert set(report.kept_scored) < set(report.scored)
    told = json.loads(json.dumps(report.fields()))
    assert told["dropped"]["duplicate"] == {"documents": 1, "examples": ["copy"]}
    assert told["read"] == told["kept"] + sum(one["documents"] for one in told["dropped"].values())

    service = RetrievalService(store)
    service.refresh()
    contexts = [context(*b"aa"), context(*b"00"), context(*b"zz")]
    counts = [len(s.tokens) for s in service.lookup(contexts, ["n"] * 3, [8] * 3)]
    assert counts[0] > 0
    assert counts[1] > 0
    assert counts[2] == 0


def test_without_refinement_all_stay_and_large_corpora_are_split(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    settings = BuildSettings(fingerprint=FINGERPRINT, rules=RULES, max_segment_tokens=8)
    report = build_corpus(store, "n", DOCUMENTS, tokenize, settings)
    assert (report.num_kept, len(report.segment_ids)) == (3, 2)
    assert report.perplexities == {}
    more = build_corpus(store, "n", [Document("more", "new text")], tokenize, settings)
    assert len(store.manifest().segment_ids("n")) == 2 + len(more.segment_ids)


def test_a_corpus_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    refinement = Refinement(scorer=SCORER, max_perplexity=1.0)
    settings = BuildSettings(fingerprint=FINGERPRINT, rules=RULES, refinement=refinement)
    with pytest.raises(ConfigError, match=r"none of 6 is left .*perplexity: 3"):
        build_corpus(store, "n", DOCUMENTS, tokenize, settings)
    with pytest.raises(ConfigError, match="none of 0 is left"):
        build_corpus(store, "n", [], tokenize, settings)
    assert not store.manifest().written


def test_what_covers_most_is_stored(tmp_path: Path) -> None:
    """Of the likeliest two one says what the other does."""
    documents = [Document("one", "aaaa"), Document("same", "aaaaa"), Document("other", "zzzy")]
    kept = {}
    for select in (*SELECTIONS, None):
        refinement = Refinement(scorer=SCORER, keep=2, select=select)
        settings = BuildSettings(fingerprint=FINGERPRINT, rules=RULES, refinement=refinement)
        report = build_corpus(
            DirectoryStore(tmp_path / str(select)), "n", documents, tokenize, settings
        )
        kept[select] = report.examples
    assert kept["lowest"] == {"perplexity": ["other"]}
    for select in ("coverage", "token_coverage", None):
        assert kept[select] == {"perplexity or coverage": ["same"]}


@pytest.mark.parametrize(
    "limits",
    [
        {"keep": 0},
        {"max_perplexity": 0.5},
        {"select": "most"},
        {"select": "coverage"},
        {"select": "token_coverage"},
    ],
)
def test_impossible_limits_are_refused(limits: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Refinement(scorer=SCORER, **limits)


def test_progress_is_told_of_each_part(tmp_path: Path) -> None:
    progress = RecordedProgress()
    refinement = Refinement(scorer=SCORER, keep=2, select="lowest")
    settings = BuildSettings(
        fingerprint=FINGERPRINT, rules=RULES, refinement=refinement, progress=progress
    )
    build_corpus(DirectoryStore(tmp_path), "n", DOCUMENTS, tokenize, settings)
    reading, scoring, sorting = progress.works
    assert (reading.total, reading.done) == (None, 6)
    assert (scoring.total, scoring.done) == (12, 12), "three of four bytes are fit"
    assert (sorting.total, sorting.done) == (2, 2)
