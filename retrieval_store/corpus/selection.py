"""Which documents of a corpus stay, where not all do.

See docs/retrieval.md, "What to keep".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from ...core.errors import ConfigError
from .coverage import by_coverage
from .documents import TokenizedDocument
from .refine import Score, decode_probs

LOWEST, COVERAGE, TOKEN_COVERAGE = "lowest", "coverage", "token_coverage"
SELECTIONS = (LOWEST, COVERAGE, TOKEN_COVERAGE)


def resolve_selection(select: str | None, keep: int | None) -> str:
    """The selection to use. None means `token_coverage` if `keep` is set, else `lowest`.

    Raises `ConfigError` if there is none of this name, or it needs `keep`.
    """
    if select is None:
        return LOWEST if keep is None else TOKEN_COVERAGE
    if select not in SELECTIONS:
        raise ConfigError("select", f"must be one of {', '.join(SELECTIONS)}, got {select!r}")
    if select != LOWEST and keep is None:
        raise ConfigError("select", f"{select} needs keep: how many documents stay")
    return select


def choose(
    documents: Sequence[TokenizedDocument],
    scores: Sequence[Score],
    select: str,
    *,
    keep: int | None = None,
    max_perplexity: float | None = None,
) -> list[int]:
    """Indices, ascending, of the first `keep` in the order of `ranking`; None: all of it."""
    return sorted(islice(ranking(documents, scores, select, max_perplexity), keep))


def ranking(
    documents: Sequence[TokenizedDocument],
    scores: Sequence[Score],
    select: str,
    max_perplexity: float | None = None,
) -> Iterator[int]:
    """Indices of the documents in the order in which they are chosen.

    select  `lowest`: by perplexity; equal ones in their order. `coverage`: the document that adds
            most n-grams comes first, see `by_coverage`, each weighted by 1 over its document's
            perplexity; `token_coverage`: by the target's probability of its last token, 0 where
            that token is not scored, for which every score needs its `token_probs`

    None above `max_perplexity`, and none of infinite perplexity.
    """
    perplexities = [score.perplexity for score in scores]
    likely = _likely(perplexities, max_perplexity)
    if select == LOWEST:
        return iter(sorted(likely, key=lambda index: (perplexities[index], index)))
    if not likely:
        return iter(())
    # Decoded lazily: as float64 they take eight times the memory of their bytes.
    weights = (
        1 / perplexities[index] if select == COVERAGE else decode_probs(_codes(scores[index]))
        for index in likely
    )
    order = by_coverage([documents[index].ids for index in likely], weights)
    return (likely[place] for place in order)


def _likely(perplexities: Sequence[float], max_perplexity: float | None) -> list[int]:
    """Indices of the finite perplexities that are at most `max_perplexity`; None: no limit."""
    limit = math.inf if max_perplexity is None else max_perplexity
    return [index for index, one in enumerate(perplexities) if one <= limit and math.isfinite(one)]


def _codes(score: Score) -> bytes:
    assert score.token_probs is not None, "scores without token_probs"
    return score.token_probs
