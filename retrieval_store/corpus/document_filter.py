"""Drops documents that would harm a retrieval store, such as licence texts, and gives the
reason."""

from __future__ import annotations

import hashlib
import re
import zlib
from dataclasses import dataclass, field

from ...core.errors import ConfigError

# Phrases from the notices of the Apache, MIT, BSD, ISC, GNU, Mozilla and Python licences that are
# rare elsewhere.
PHRASES = re.compile(
    r"""
    copyright\ (\(c\)|©|[12][0-9]{3})
    | all\ rights\ reserved
    | spdx-license-identifier
    | licen[sc]ed\ (to|under)
    | under\ the\ (terms|licen[sc]e)
    | licen[sc]e\ agreement
    | (general|lesser|mozilla)\ public\ licen[sc]e
    | permission\ (is\ hereby\ granted|to\ use,\ copy)
    | (this|above)\ (copyright|permission)\ notice
    | copyright\ (notice|holder|owner)
    | redistributions?\ (and\ use|of\ source|in\ binary|must)
    | (with|without)\ warrant(y|ies)
    | "?as[ ]is"?\ (basis|and|,|without)
    | warranties\ of\ merchantability
    | fitness\ for\ a\ particular\ purpose
    | in\ no\ event\ shall
    | (in)?direct,\ indirect|consequential\ damages
    | apache\.org/licenses | gnu\.org/licenses | opensource\.org/licenses
    | compliance\ with\ the\ licen[sc]e
    | required\ by\ applicable\ law
    | free\ software\ foundation
    """,
    re.VERBOSE | re.IGNORECASE,
)
MARKERS = re.compile(r"^[ \t]*(?:#+|//+|/?\*+/?|;+|--|%+|<!--|\"{3}|'{3})?[ \t]*", re.MULTILINE)
# A paragraph is a notice if it has one phrase for this many characters, a sentence or two.
CHARS_A_PHRASE = 300


def licence_share(text: str) -> float:
    """The share, 0 to 1, of characters in licence and copyright notices.

    White space is not counted, nor are comment markers at the start of lines.
    """
    total = notices = 0
    for paragraph in re.split(r"\n\s*\n", MARKERS.sub("", text)):
        plain = " ".join(paragraph.split())
        total += len(plain)
        if len(plain) <= CHARS_A_PHRASE * len(PHRASES.findall(plain)):
            notices += len(plain)
    return notices / total if total else 0.0


# Length of the word runs that are compared; one run in `RUN_SAMPLE` is remembered.
RUN_WORDS = 8
RUN_SAMPLE = 16
# A document of fewer sampled runs is too short to be called a near copy.
MIN_RUNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRules:
    """The rules that a document must pass.

    min_tokens             shorter ones hold little to continue, and their perplexity is noise
    min_compression_ratio  compressed size / size; below it a text is one line over and over, which
                           has a low perplexity and would be kept by refinement
    max_licence_share      largest share of the text in licence and copyright notices
    max_overlap            largest share of sampled word runs that earlier documents have
    """

    min_tokens: int = 64
    min_compression_ratio: float = 0.05
    max_licence_share: float = 0.5
    max_overlap: float = 0.8

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ConfigError("min_tokens", f"must be at least 1, got {self.min_tokens}")
        for name in ("min_compression_ratio", "max_licence_share", "max_overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, f"must be from 0 to 1, got {getattr(self, name)}")


@dataclass(slots=True)
class DocumentFilter:
    """Names the reason to drop a document; remembers documents that are kept."""

    rules: DocumentRules = field(default_factory=DocumentRules)
    _seen: set[bytes] = field(default_factory=set)
    _runs: set[int] = field(default_factory=set)

    def text_fault(self, text: str) -> str | None:
        """The reason to drop a text: it repeats itself, is a licence, or a copy; None: it is kept.

        White space is ignored when texts are compared.
        """
        words = text.split()
        plain = " ".join(words).encode("utf-8", errors="surrogatepass")
        if len(plain) > 0 and _compression_ratio(plain) < self.rules.min_compression_ratio:
            return "repetitive"
        digest = hashlib.sha256(plain).digest()
        if digest in self._seen:
            return "duplicate"
        if licence_share(text) > self.rules.max_licence_share:
            return "licence"
        runs = _sampled_runs(words)
        if len(runs) >= MIN_RUNS and len(runs & self._runs) > self.rules.max_overlap * len(runs):
            return "near duplicate"
        self._seen.add(digest)
        self._runs |= runs
        return None

    def length_fault(self, num_tokens: int) -> str | None:
        """The reason to drop a document of this length; None: it is kept."""
        return "too short" if num_tokens < self.rules.min_tokens else None


def _compression_ratio(plain: bytes) -> float:
    return len(zlib.compress(plain)) / len(plain)


def _sampled_runs(words: list[str]) -> set[int]:
    """Hashes of the runs that are divisible by `RUN_SAMPLE`: the same ones in every copy (Manber,
    USENIX 1994)."""
    runs = (
        " ".join(words[start : start + RUN_WORDS]) for start in range(len(words) - RUN_WORDS + 1)
    )
    hashes = (zlib.crc32(run.encode("utf-8", errors="surrogatepass")) for run in runs)
    return {value for value in hashes if value % RUN_SAMPLE == 0}
