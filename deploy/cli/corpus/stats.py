"""`draftline corpus stats`: the figures of each namespace of a store."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass

from ....core.errors import DamagedError, StoreError
from ....retrieval_store.delta.delta_log import LogSurvey, survey_logs
from ....retrieval_store.search.lookup import SHARED
from ....retrieval_store.serving.open_store import open_all_logs, open_policy, open_store
from ....retrieval_store.store import SegmentStore, listed_sizes

COLUMNS = (
    "namespace", "segments", "documents", "tokens", "bytes", "learned", "damaged", "learning"
)  # fmt: skip


@dataclass(slots=True)
class NamespaceStats:
    """Counts of one namespace.

    num_learned  texts, and credits to texts, that are not folded yet; None: they cannot be read
    num_damaged  segments and entries of logs that are passed over
    learning     `allowed`, `off`, or `never`
    """

    name: str
    num_segments: int
    num_bytes: int
    learning: str
    num_documents: int = 0
    num_tokens: int = 0
    num_learned: int | None = None
    num_damaged: int = 0

    def row(self) -> tuple[str, ...]:
        """A cell for each of `COLUMNS`."""
        counts = (
            self.num_segments, self.num_documents, self.num_tokens, self.num_bytes,
            self.num_learned, self.num_damaged,
        )  # fmt: skip
        cells = ("?" if count is None else f"{count:,}" for count in counts)
        return (self.name, *cells, self.learning)


def store_stats(url: str) -> tuple[list[NamespaceStats], StoreError | None]:
    """Counts of every namespace in a store, and the error where what was learned cannot be read.

    Raises `StoreError` if the store is out of reach, or is seen to have lost its manifest.
    """
    store, off = open_store(url), open_policy(url).off()
    listed = listed_sizes(store)
    survey, unread = _survey(url)
    learned = set[str]() if survey is None else {*survey.entries, *survey.damaged}
    stats = []
    for name in [*listed, *sorted((off | learned) - listed.keys())]:
        sizes = listed.get(name, {})
        policy = "never" if name == SHARED else "off" if name in off else "allowed"
        counts = NamespaceStats(name, len(sizes), sum(sizes.values()), policy)
        for segment_id in sizes:
            _add_segment(counts, store, segment_id)
        if survey is not None:
            counts.num_learned = survey.entries[name]
            counts.num_damaged += survey.damaged[name]
        stats.append(counts)
    return stats, unread


def _survey(url: str) -> tuple[LogSurvey | None, StoreError | None]:
    # Who may read segments need not be allowed to read what is learned.
    try:
        with ExitStack() as stack:
            logs = [stack.enter_context(closing(log)) for log in open_all_logs(url)]
            return survey_logs(logs), None
    except StoreError as error:
        return None, error


def _add_segment(stats: NamespaceStats, store: SegmentStore, segment_id: str) -> None:
    try:
        header = store.get(stats.name, segment_id).header
    except DamagedError:
        stats.num_damaged += 1
    else:
        stats.num_documents += header.num_documents
        stats.num_tokens += header.num_tokens
