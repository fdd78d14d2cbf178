"""What is asked of `draftline corpus build` and `add`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Selection = Literal["lowest", "coverage", "token_coverage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusJob:
    """Documents to add, and how they are chosen.

    inputs                 files and folders
    model                  that the store is for, and that scores the documents
    keep, select, max_perplexity  see `Refinement`; None: no limit, its default
    min_tokens, min_compression_ratio  see `DocumentRules`
    journal                file of scores; None: beside a store that is a folder, else none
    histogram, report      PNG and JSON file; None: none
    """

    inputs: tuple[Path, ...]
    model: str
    namespace: str
    keep: int | None
    select: Selection | None
    max_perplexity: float | None
    min_tokens: int
    min_compression_ratio: float
    journal: Path | None
    histogram: Path | None
    report: Path | None
