"""Text for the store's benchmark: sources of the machine among synthetic Zipf-Markov documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core.arrays import Float64, Int32
from ...core.compiled import compiled
from ...models.load.bundled import demo_path
from ...models.text.tokenizer import load_tokenizer
from ...training.corpus import SourceFile, held_out_files, training_files

# Synthetic tokens; sources have the demo model's, which are fewer.
VOCAB_SIZE = 50_000
ZIPF_EXPONENT = 1.05
# A pair of tokens is followed by one of these, the k-th with probability 2**-(k + 1), and in one
# of 16 cases by any token.
BRANCHES = 8
NOISE = 1 / 16
DOCUMENT_LEN = 1000
CONTEXT_LEN = 16


@dataclass(frozen=True, slots=True, eq=False)
class StoreText:
    """Documents of int32 token ids, and contexts int32 [n, 16] out of text that is not stored."""

    documents: list[Int32]
    contexts: Int32


def store_text(num_tokens: int, num_contexts: int) -> StoreText:
    """About `num_tokens` of documents, shuffled: every source there is, and synthetic ones.

    Half of the contexts are out of held-out sources, half out of synthetic text. The same on every
    call on one machine.
    """
    rng = np.random.default_rng(0)
    sources, total = [], 0
    for document in _tokenized(training_files(more=True)):
        if total + len(document) > num_tokens // 2:
            break
        sources.append(document)
        total += len(document)
    synthetic = zipf_markov(num_tokens - total, rng)
    documents = [*sources, *_cut(synthetic, rng)]
    order = rng.permutation(len(documents))
    held_out = np.concatenate(_tokenized(held_out_files()))
    texts = (held_out, zipf_markov(max(10 * CONTEXT_LEN, num_contexts), rng))
    contexts = [_windows(text, num_contexts // 2, rng) for text in texts]
    return StoreText([documents[index] for index in order], np.concatenate(contexts))


def zipf_markov(count: int, rng: np.random.Generator) -> Int32:
    """`count` tokens: each pair of tokens has a few top next tokens of its own, drawn by Zipf's
    distribution.
    """
    weights = np.arange(1, VOCAB_SIZE + 1) ** -ZIPF_EXPONENT
    levels = np.cumsum(weights) / weights.sum()
    # The top next tokens of a pair are looked up by a hash of it in this table of drawn tokens.
    table = np.searchsorted(levels, rng.random(2**20)).astype(np.int32)
    return _walk(table, rng.random(count))


def _tokenized(files: list[SourceFile]) -> list[Int32]:
    tokenizer = load_tokenizer(demo_path("demo"))
    texts = [file.text for file in files]
    return [np.array(ids, dtype=np.int32) for ids in tokenizer(texts, verbose=False)["input_ids"]]


def _cut(text: Int32, rng: np.random.Generator) -> list[Int32]:
    lengths = rng.geometric(1 / DOCUMENT_LEN, 2 * len(text) // DOCUMENT_LEN + 1)
    ends = np.cumsum(lengths)
    return [part for part in np.split(text, ends[ends < len(text)]) if len(part)]


def _windows(text: Int32, count: int, rng: np.random.Generator) -> Int32:
    starts = rng.integers(0, len(text) - CONTEXT_LEN, count)
    return text[starts[:, None] + np.arange(CONTEXT_LEN)]


@compiled
def _walk(table: Int32, uniforms: Float64) -> NDArray[np.int32]:
    text = np.empty(len(uniforms), dtype=np.int32)
    before, last = np.int64(0), np.int64(0)
    for place in range(len(uniforms)):
        uniform = uniforms[place]
        if uniform < NOISE:
            found = np.int64(uniform / NOISE * len(table))
        else:
            rest = (uniform - NOISE) / (1 - NOISE)
            branch = min(np.int64(-np.log2(1 - rest)), BRANCHES - 1)
            found = before * 1_000_003 + last * 7_919 + branch * 104_729
        token = table[found % len(table)]
        before, last = last, np.int64(token)
        text[place] = token
    return text
